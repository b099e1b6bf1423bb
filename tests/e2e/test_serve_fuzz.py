"""Random requests to a real kd-serve process: no answer is a 5xx but 503, and nothing
is raised that nobody catches.

`KD_FUZZ=20000 pytest tests/e2e/test_serve_fuzz.py` tries that many random inputs a
test; without it the same 350 each.
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
from collections import Counter
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from fuzzing import IMAGES, damaged, fuzz, image, junk, texts
from hypothesis import given
from hypothesis import strategies as st
from serving import Running

pytestmark = pytest.mark.slow

EXAMPLES, FUZZ = fuzz(350)


class Target:
    """A server, one kept connection to it, and what it has answered."""

    def __init__(self, server: Running) -> None:
        self.server = server
        self.statuses = Counter()
        self._connection = http.client.HTTPConnection(
            server.host, server.port, timeout=20
        )

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> int:
        """Send a request; a connection that the server has closed before is opened
        again.
        """
        for _ in range(2):
            try:
                self._connection.request("POST", path, body, headers)
                response = self._connection.getresponse()
                response.read()
                break
            except (http.client.RemoteDisconnected, ConnectionError):
                self._connection.close()
        else:
            raise AssertionError("the server closes new connections")
        return self._record(response.status)

    def raw(self, data: bytes) -> None:
        """Send bytes on a connection of their own and look at the statuses that come
        back within 20 ms.
        """
        with socket.create_connection(
            (self.server.host, self.server.port), timeout=20
        ) as connection:
            received = b""
            try:
                connection.sendall(data)
                connection.settimeout(0.02)
                while block := connection.recv(65536):
                    received += block
            except (TimeoutError, ConnectionError):
                pass
        if not received:
            self.statuses["no answer"] += 1
        for line in received.split(b"HTTP/1.1 ")[1:]:
            self._record(int(line[:3]))

    def _record(self, status: int) -> int:
        self.statuses[status] += 1
        assert status < 500 or status == 503
        return status

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="module")
def server(exported) -> Iterator[Running]:
    with Running(exported, "--quiet", "--body-timeout", "1") as running:
        yield running
        assert running.get("/ping").status == 200
        assert running.stop() == 0
    assert "Traceback" not in running.errors
    assert " bug: " not in running.errors


@pytest.fixture
def target(server, request, record_property) -> Iterator[Target]:
    client = Target(server)
    yield client
    client.close()
    record_property("tried", sum(client.statuses.values()))
    print(
        f"{request.node.name}: {sum(client.statuses.values())} answers,"
        f" {dict(client.statuses)}"
    )
    assert sum(client.statuses.values()) >= EXAMPLES * 0.9


words = texts("image", "images", "x" * 300)
numbers = st.one_of(
    st.integers(-2, 300),
    st.sampled_from([2**63, -(10**40), 0.5, 1e308, float("inf"), float("nan")]),
)
anything = junk(st.one_of(st.none(), st.booleans(), numbers, words), words)


def mostly(strategy: st.SearchStrategy) -> st.SearchStrategy:
    """Draw from the strategy nine times of ten, else anything that JSON has."""
    return st.integers(0, 9).flatmap(lambda n: strategy if n else anything)


def encoded(document: object) -> st.SearchStrategy[bytes]:
    body = json.dumps(document).encode()
    return st.one_of(
        st.just(body), damaged(body), st.just(json.dumps(document).encode("utf-16"))
    )


FILES = [
    *IMAGES.values(), image("JPEG", "CMYK"), image("PNG", "1"), image("PNG", "RGBA"),
]  # fmt: skip
files = st.sampled_from(FILES).flatmap(
    lambda file: st.one_of(st.just(file), damaged(file))
)
base64s = st.one_of(files.map(lambda file: base64.b64encode(file).decode()), words)
documents = st.one_of(
    st.fixed_dictionaries({"image": mostly(base64s)}),
    st.fixed_dictionaries({"images": mostly(st.lists(mostly(base64s), max_size=4))}),
    anything,
)
multiparts = st.lists(files, max_size=3).map(
    lambda entries: (
        b"".join(b"--x\r\na: b\r\n\r\n" + entry + b"\r\n" for entry in entries)
        + b"--x--\r\n"
    )
)
requests = st.one_of(
    st.tuples(st.sampled_from(["image/jpeg", "application/x-image"]), files),
    st.tuples(st.just("application/json"), documents.flatmap(encoded)),
    st.tuples(
        st.just("multipart/form-data; boundary=x"),
        multiparts.flatmap(lambda m: st.one_of(st.just(m), damaged(m))),
    ),
    st.tuples(
        st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=60).map(
            str.strip
        ),
        st.binary(max_size=60),
    ),
)
values = st.one_of(
    st.just("*/*"),
    st.sampled_from(
        [
            "text/csv",
            "application/json;q=0.1, text/csv",
            "text/html",
            "application/*;q=x",
            "",
            ",",
            ";",
        ]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60),
)
queries = st.one_of(
    st.just(""),
    st.integers(-1, 9).map(lambda n: f"?top={n}"),
    words.map(lambda t: "?top=" + quote(t, errors="replace")),
)


def test_bodies_for_invocations_give_no_500(target):
    @FUZZ
    @given(requests, values, queries)
    def tried(request, accept, query):
        kind, body = request
        target.post(
            f"/invocations{query}", body, {"content-type": kind, "accept": accept}
        )

    tried()
    assert target.statuses[200] > 3


PIECES = [
    b"GET", b"POST", b"HEAD", b"CONNECT", b"OPTIONS", b" ", b"/ping", b"/invocations", b"/metrics", b"/",
    b"*", b"http://x/ping", b"/%ff%00/ready", b" HTTP/1.1", b" HTTP/1.0", b" HTTP/2.0",
    b"\r\n", b"\n", b"\r",
    b"\r\n\r\n", b"host: x", b"content-length: 5", b"content-length: -1", b"content-length: 5, 5",
    b"transfer-encoding: chunked", b"transfer-encoding: gzip", b"content-type: image/png", b"expect: 100-continue",
    b"connection: close", b"connection: upgrade", b"upgrade: websocket", b"upgrade: h2c", b"accept: \xff",
    b"5\r\nhello\r\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"-1\r\n", b"1;a=b\r\nx\r\n",
    b"trailer: x\r\n\r\n", b"hello", b": ",
    b"a:" + 3000 * b"b", 200 * b"a: b\r\n",
]  # fmt: skip
VALID = [
    (
        b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-type:"
        b" image/png\r\ncontent-length: 5\r\n\r\nhello"
    ),
    (
        b"POST /invocations HTTP/1.1\r\nhost: x\r\ntransfer-encoding:"
        b" chunked\r\n\r\n2\r\n{}\r\n0\r\na: b\r\n\r\n"
    ),
    (
        b"POST /ping HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length:"
        b" 5\r\n\r\nhello"
    ),
    (
        b"GET /some/other/path HTTP/1.1\r\nhost: x\r\n\r\nGET /metrics"
        b" HTTP/1.1\r\nhost: x\r\n\r\n"
    ),
]
pieces = st.lists(
    st.one_of(st.sampled_from(PIECES), st.binary(max_size=8)), max_size=12
).map(b"".join)
mutations = st.builds(
    lambda text, at, gone, put: text[: at % len(text)] + put + text[at % len(text) + gone :],
    st.sampled_from(VALID), st.integers(0, 200), st.integers(0, 20), pieces,
)  # fmt: skip


def test_bytes_that_are_nearly_http_give_no_500(target):
    @FUZZ
    @given(st.one_of(pieces, mutations))
    def tried(data):
        target.raw(data)

    tried()
    assert target.statuses[400] > EXAMPLES // 10
