"""What a request leaves behind in the server: after every refusal all counters are as
they were.
"""

import asyncio
import base64
import json
import threading

import pytest
from starlette.requests import ClientDisconnect, Request

from kd.deploy.serve.app import request_body
from kd.deploy.serve.limits import Limits, Problem
from kd.deploy.serve.model import describe
from kd.deploy.serve.service import Service

PIECE = b"x" * 1000


@pytest.fixture
def service(exported):
    service = Service(describe(exported), Limits(max_body=4500), slots=1, threads=1)
    service.load()
    yield service
    service.close()


def request(
    pieces: int,
    header: tuple[bytes, bytes] = (b"transfer-encoding", b"chunked"),
    gone: bool = False,
):
    """A POST whose body arrives in pieces; `gone`: the client hangs up after
    the last.
    """
    last = (
        {"type": "http.disconnect"}
        if gone
        else {"type": "http.request", "body": b"", "more_body": False}
    )
    messages = iter(
        [*[{"type": "http.request", "body": PIECE, "more_body": True}] * pieces, last]
    )

    async def receive():
        return next(messages)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "query_string": b"",
        "headers": [header],
    }
    return Request(scope, receive)


async def take_body(request: Request, service: Service) -> int:
    async with request_body(request, service):
        return service.buffered


def test_an_accepted_body_is_counted_while_it_is_used_and_given_back(service):
    assert asyncio.run(take_body(request(3), service)) == 3000
    assert service.buffered == 0


@pytest.mark.parametrize("repeated", range(2))
@pytest.mark.parametrize(
    ("make_request", "status"),
    [
        (
            lambda: request(6),
            413,
        ),  # too large, told by counting: four pieces were kept before
        (lambda: request(30), 413),  # read to the limit of what is discarded
        (lambda: request(3, gone=True), 400),
        (lambda: request(3, (b"content-length", b"three")), 400),
        (lambda: request(3, (b"content-length", b"9000")), 413),
    ],
    ids=["counted", "endless", "hung up", "no number", "declared"],
)
def test_a_refused_body_is_given_back(service, make_request, status, repeated):
    with pytest.raises(Problem) as caught:
        asyncio.run(take_body(make_request(), service))
    assert caught.value.status == status
    assert (service.buffered, service.in_progress) == (0, 0)


def test_a_body_beyond_the_memory_of_all_bodies_is_given_back(exported):
    service = Service(
        describe(exported), Limits(max_body=4500, max_buffered=2500), slots=1, threads=1
    )
    service.load()
    try:
        with pytest.raises(Problem) as caught:
            asyncio.run(take_body(request(3), service))
        assert (caught.value.status, service.buffered) == (503, 0)
        assert asyncio.run(take_body(request(2), service)) == 2000
    finally:
        service.close()


def test_a_body_that_does_not_arrive_is_given_back(exported):
    service = Service(describe(exported), Limits(body_seconds=0.05), slots=1, threads=1)
    service.load()

    async def receive():
        if (count := next(counted)) < 3:
            return {"type": "http.request", "body": PIECE, "more_body": True}
        return await asyncio.sleep(60, {"type": "http.disconnect", "count": count})

    counted = iter(range(9))
    late = Request(
        {
            "type": "http",
            "method": "POST",
            "path": "/",
            "query_string": b"",
            "headers": [],
        },
        receive,
    )
    try:
        with pytest.raises(Problem) as caught:
            asyncio.run(take_body(late, service))
        assert (caught.value.status, service.buffered) == (408, 0)
    finally:
        service.close()


@pytest.mark.parametrize(
    ("deadline", "stays", "status"),
    [(0.01, 60, 503), (60, 0, 400)],
    ids=["late", "hung up"],
)
def test_a_request_given_up_counts_until_its_job_is_done_or_not_at_all(
    service, deadline, stays, status
):
    """The job of the first has begun, that of the second waits for the one thread and
    is taken back.
    """
    service.limits = Limits(deadline=deadline, max_in_flight=2)
    started = threading.Event()
    end = threading.Event()

    async def ask() -> tuple[int, int]:
        with pytest.raises(Problem) as caught:
            await service.run(
                lambda _: started.set() or end.wait(20),
                lambda: started.wait(20) and asyncio.sleep(stays),
            )
        await asyncio.sleep(0.01)  # what the threads have sent arrives
        return caught.value.status, service.in_flight

    async def ask_twice() -> list[tuple[int, int]]:
        results = [await ask(), await ask()]
        end.set()
        service.close()
        await asyncio.sleep(0)
        return results

    assert asyncio.run(ask_twice()) == [(status, 1), (status, 1)]
    assert service.in_flight == 0


def test_a_client_that_hangs_up_is_a_disconnect_of_starlette():
    with pytest.raises(ClientDisconnect):
        asyncio.run(request(1, gone=True).body())


def test_only_classified_images_are_counted(service, photos):
    """The second picture of the refused request opens and does not decode."""
    data = next((photos / "val/fig").glob("*.jpg")).read_bytes()

    def classify(*files: bytes) -> None:
        body = json.dumps(
            {"images": [base64.b64encode(file).decode() for file in files]}
        ).encode()
        service.classify(service.model, "application/json", "application/json", body)

    classify(data, data)
    with pytest.raises(Problem, match="image 2 of 2"):
        classify(data, data[:-40])
    assert b"\nkd_images_total 2.0\n" in service.metrics.text()
