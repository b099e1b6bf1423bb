"""A real kd-serve process: its contract, its answers, what clients can do to it, and
how it ends.
"""

from __future__ import annotations

import base64
import csv
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from pieces import centre, wait_until
from PIL import Image
from serving import ROOT, Reply, Running, images, validation, with_other_weights

from kd.core.host import installed
from kd.deploy.export.export import ExportOptions, export
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.model import describe, load


@pytest.fixture(scope="module")
def server(exported):
    with Running(exported, "--body-timeout", "2") as running:
        yield running
        assert running.stop() == 0, running.errors
    assert "Traceback" not in running.errors
    assert " bug: " not in running.errors


@pytest.fixture(scope="module")
def photo(photos) -> bytes:
    return next((photos / "val/fig").glob("*.jpg")).read_bytes()


def is_problem(reply: Reply, status: int) -> bool:
    assert (reply.status, reply.headers["content-type"]) == (
        status,
        "application/problem+json",
    ), reply
    content = reply.json
    assert content["status"] == status
    assert set(content) == {"type", "title", "status", "detail", "message"}
    assert content["detail"].endswith((".", ")"))
    return True


# --------------------------------------------------------------------------------
# answers


def test_every_prediction_equals_timms_on_the_validation_split(
    server, exported, photos
):
    """Plain timm, torch and Pillow on one side, the graph and HTTP on the other."""
    network = timm.create_model(f"local-dir:{exported}", pretrained=True).eval()
    config = network.pretrained_cfg
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    pixels = np.stack(
        [centre(path) for path in sorted((photos / "val").rglob("*.jpg"))]
    )
    with torch.no_grad():
        logits = network((torch.from_numpy(pixels) / 255 - mean) / std)
    assert (
        np.abs(load(describe(exported), 1, 1).engine(pixels) - logits.numpy()).max()
        < 1e-4
    )
    parity = json.loads((exported / "manifest.json").read_text())["parity"][
        "model.onnx"
    ]
    assert (parity["images"], parity["same_top1"]) == (13, 13)
    assert parity["max_difference"] < 1e-4
    for (data, _), best in zip(validation(photos), logits.softmax(1), strict=True):
        prediction = server.post(data, "image/jpeg").json["predictions"][0]
        assert prediction["label"] == config["label_names"][best.argmax()]
        assert prediction["score"] == pytest.approx(best.max().item(), abs=1e-4)
        assert [entry["score"] for entry in prediction["top"]] == sorted(
            e["score"] for e in prediction["top"]
        )[::-1]


def test_the_endpoint_scores_what_the_run_scored(server, exported, photos):
    right = [
        server.post(data).json["predictions"][0]["label"] == label
        for data, label in validation(photos)
    ]
    recorded = json.loads((exported / "kd.json").read_text())["metrics"]["accuracy"]
    assert sum(right) / len(right) == pytest.approx(recorded, abs=1e-4)


def test_every_way_to_send_an_image_gives_the_same_prediction(server, photo):
    expected = server.post(photo, "image/jpeg").json
    text = base64.b64encode(photo).decode()
    multipart = (
        b'--x\r\ncontent-disposition: form-data; name="a"; filename="a.jpg"\r\n\r\n'
        + photo
        + b"\r\n--x--\r\n"
    )
    for body, kind in [
        (photo, "application/x-image"),
        (photo, "IMAGE/JPEG; charset=binary"),
        (json.dumps({"image": text}).encode(), "application/json"),
        (json.dumps({"images": [text]}).encode(), "application/json; charset=utf-8"),
        (multipart, "multipart/form-data; boundary=x"),
    ]:
        reply = server.post(body, kind)
        assert (reply.status, reply.headers["content-type"], reply.json) == (
            200,
            "application/json",
            expected,
        ), kind


def test_several_images_keep_their_order(server, photos):
    files = [data for data, _ in validation(photos)[::4]]
    single = [server.post(data).json["predictions"][0] for data in files]
    assert server.post(images(*files), "application/json").json["predictions"] == single


def test_csv_has_as_many_labels_as_top_says(server, photo):
    reply = server.post(photo, path="/invocations?top=2", accept="text/csv")
    assert reply.headers["content-type"].startswith("text/csv")
    (row,) = csv.reader(io.StringIO(reply.body.decode()))
    top = server.post(photo).json["predictions"][0]["top"]
    assert row == [str(top[i][key]) for i in range(2) for key in ("label", "score")]
    assert (
        len(
            server.post(photo, path="/invocations?top=999").json["predictions"][0][
                "top"
            ]
        )
        == 3
    )


def test_metrics_count_the_requests(server, photo):
    def count() -> int:
        text = server.get("/metrics").body.decode()
        match = re.search(
            r'kd_requests_total\{route="invocations",status="200"\} (\d+)', text
        )
        return int(match[1]) if match else 0

    before = count()
    for _ in range(3):
        server.post(photo)
    assert count() == before + 3


def test_no_torch_in_the_process(exported):
    script = """
import pathlib, sys
import granian.server.embed
import kd.cli.serving, kd.deploy.serve.server
from kd.deploy.serve import app
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.model import describe
from kd.deploy.serve.service import Service
service = Service(describe(pathlib.Path(sys.argv[1])), Limits(), 1, 1)
service.load()
app.build(service)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "timm", "omegaconf", "safetensors"}))
"""
    run = subprocess.run(
        [sys.executable, "-c", script, exported],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "[]\n"


# --------------------------------------------------------------------------------
# refusals


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("GET", "/nothing", {}, None, 404),
        ("GET", "/invocations", {}, None, 405),
        ("POST", "/ping", {}, b"", 405),
        ("DELETE", "/invocations", {}, None, 405),
        ("GET", "/docs", {}, None, 404),
        ("GET", "/models", {}, None, 404),
        ("GET", "/v2/health/ready", {}, None, 404),
        ("POST", "/invocations", {}, b"x", 415),
        ("POST", "/invocations", {"content_type": "text/csv"}, b"x", 415),
        ("POST", "/invocations", {"content_type": "image/png"}, b"", 400),
        (
            "POST",
            "/invocations",
            {"content_type": "image/png", "accept": "text/html"},
            b"x",
            406,
        ),
        ("POST", "/invocations?top=0", {"content_type": "image/png"}, b"x", 400),
        ("POST", "/invocations?top=-1", {"content_type": "image/png"}, b"x", 400),
        ("POST", "/invocations?top=1e9", {"content_type": "image/png"}, b"x", 400),
    ],
)
def test_a_wrong_request_is_refused(server, method, path, headers, body, status):
    reply = server.call(method, path, body, **headers)
    assert is_problem(reply, status)
    if status == 405:
        assert reply.headers["allow"]


def test_a_body_that_is_too_large_is_a_413(server):
    """Declared; declared and only announced (Expect); and not declared at all but sent
    in chunks.
    """
    limit = Limits().max_body
    assert is_problem(server.post(bytes(limit + 1)), 413)
    head = (
        "POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-type:"
        f" image/png\r\ncontent-length: {limit + 1}\r\n"
    )
    assert server.raw(f"{head}expect: 100-continue\r\n\r\n".encode()).startswith(
        b"HTTP/1.1 413 "
    )
    chunked = (
        b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-type:"
        b" image/png\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    chunk = b"%x\r\n" % 2**20 + bytes(2**20) + b"\r\n"
    assert server.raw(chunked + 26 * chunk + b"0\r\n\r\n").startswith(b"HTTP/1.1 413 ")
    assert (
        server.post(bytes(limit)).status == 415
    )  # the limit itself is taken, and is no image


@pytest.mark.parametrize("length", [b"-1", b"1e3", b"abc", b"9" * 30, b"5, 6"])
def test_an_invalid_content_length_is_refused(server, length):
    head = (
        b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-type:"
        b" image/png\r\ncontent-length: " + length
    )
    assert server.raw(head + b"\r\n\r\nhello", 20)[:12] in (
        b"HTTP/1.1 400",
        b"HTTP/1.1 413",
    )


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"\0" * 300,
        b"A" * 70_000 + b"\r\n\r\n",
    ],
)
def test_bytes_that_are_not_http_are_refused(server, data):
    assert server.raw(data).startswith(b"HTTP/1.1 400 ")


def test_a_slow_body_is_a_408(server):
    start = time.monotonic()
    head = (
        b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-type:"
        b" image/png\r\ncontent-length: 100\r\n\r\n12345"
    )
    assert server.raw(head).startswith(b"HTTP/1.1 408 ")
    assert 1.5 < time.monotonic() - start < 6


def test_connections_that_send_no_whole_header_are_closed(exported):
    """No byte, half a header, half a second request: all are closed, and none of them
    before its time.
    """
    begins = [
        b"",
        b"GET /ping HTTP/1.1\r\nhost:",
        b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\nGET /pi",
    ]
    with Running(exported, "--keep-alive", "1") as server:
        opened = [
            socket.create_connection((server.host, server.port), timeout=10)
            for _ in begins
        ]
        start = time.monotonic()
        for connection, data in zip(opened, begins, strict=True):
            connection.sendall(data)
        for connection in opened:
            while connection.recv(1000):
                pass
            connection.close()
        assert 0.7 < time.monotonic() - start < 5


# --------------------------------------------------------------------------------
# malformed corpus


def picture(
    kind: str, size: tuple[int, int], mode: str = "RGB", **options: object
) -> bytes:
    file = io.BytesIO()
    if mode == "RGB":
        noise = np.random.default_rng(7).integers(
            0, 256, (size[1], size[0], 3), np.uint8
        )
        Image.fromarray(noise).save(file, kind, **options)
    else:
        Image.new(mode, size).save(file, kind)
    return file.getvalue()


def corpus(photo: bytes) -> list[tuple[bytes, str]]:
    """Several hundred bodies that are no request a client should send."""
    generator = np.random.default_rng(7)
    bodies: list[tuple[bytes, str]] = []
    kinds = [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
    ]
    for kind, options in kinds:
        complete = picture(kind, (64, 48), **options)
        bodies += [
            (complete[:cut], "application/x-image")
            for cut in np.linspace(1, len(complete) - 2, 25).astype(int)
        ]
        for _ in range(25):
            broken = bytearray(complete)
            for place in generator.integers(2, len(broken), 8):
                broken[place] = generator.integers(256)
            bodies.append((bytes(broken), "application/x-image"))
    magics = [
        b"\xff\xd8\xff\xe0",
        b"\x89PNG\r\n\x1a\n",
        b"RIFF\x24\0\0\0WEBPVP8 ",
        b"GIF89a",
        b"II*\0",
        b"%!PS",
        b"",
        b"PK",
    ]
    bodies += [
        (magic + generator.bytes(n), "image/jpeg")
        for magic in magics
        for n in (0, 1, 10, 100, 5000)
    ]
    for size, mode in (
        ((1, 1), "RGB"),
        ((3000, 5), "L"),
        ((64, 64), "1"),
        ((64, 64), "P"),
        ((64, 64), "I;16"),
    ):
        bodies.append((picture("PNG", size, mode), "image/png"))
    for side in (5001, 20_000, 65_535):
        header = bytearray(picture("PNG", (side, 4), "1"))
        header[20:24] = side.to_bytes(4, "big")
        bodies.append((bytes(header), "image/png"))
    text = base64.b64encode(photo).decode()
    documents = [
        {}, [], None, 7, "x", {"image": []}, {"images": {}}, {"images": [None]}, {"image": text[:-3]}, {"image": ""},
        {"images": [text] * 17}, {"image": "http://169.254.169.254/latest/meta-data/"}, {"image": "file:///etc/passwd"},
    ]  # fmt: skip
    bodies += [
        (json.dumps(document).encode(), "application/json") for document in documents
    ]
    bodies += [(b"[" * n, "application/json") for n in (1, 1000, 200_000)]
    for kind in ("application/json", "multipart/form-data; boundary=x"):
        bodies += [(generator.bytes(n), kind) for n in (1, 50, 5000)]
    bodies += [
        (b"--x\r\n\r\n" + photo[:n] + b"\r\n--x--", "multipart/form-data; boundary=x")
        for n in (0, 9, 99)
    ]
    kinds = (
        "",
        "image/gif",
        "text/html",
        "image/svg+xml",
        "a" * 5000,
        "multipart/form-data",
    )
    return bodies + [(photo, kind) for kind in kinds]


def test_malformed_bodies_break_nothing(server, photo):
    """Not one 5xx, the server alive with bounded memory, and the next good request
    answered as before.
    """
    bodies = corpus(photo)
    assert len(bodies) > 300
    expected = server.post(photo).json
    before = server.memory_mb()
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda item: server.post(*item), bodies))
    statuses = Counter(reply.status for reply in replies)
    assert not [status for status in statuses if status >= 500], statuses
    assert set(statuses) <= {200, 400, 413, 415, 422}
    assert sum(statuses.values()) - statuses[200] > 200, (
        statuses
    )  # a flipped byte may leave a whole image
    assert all(
        is_problem(reply, reply.status) for reply in replies if reply.status != 200
    )
    assert server.post(photo).json == expected
    assert server.memory_mb() < before + 60


# --------------------------------------------------------------------------------
# load, limits, end


def test_overload_gets_503_without_queueing(exported, photos):
    """With `--max-in-flight 2` some of many concurrent requests are answered, and the
    rest get 503 with Retry-After.
    """
    big = picture("PNG", (3000, 2000), "L")
    with (
        Running(exported, "--max-in-flight", "2", "--slots", "1") as server,
        ThreadPoolExecutor(16) as pool,
    ):
        replies = list(pool.map(lambda _: server.post(big, "image/png"), range(48)))
        statuses = Counter(reply.status for reply in replies)
        assert set(statuses) == {200, 503}
        assert statuses[200] >= 2
        busy = next(reply for reply in replies if reply.status == 503)
        assert is_problem(busy, 503)
        assert int(busy.headers["retry-after"]) >= 1
        assert server.get("/ping").status == 200
        assert server.post(validation(photos)[0][0]).status == 200


def test_a_deadline_ends_a_request_and_no_page_is_shown_if_none_is_wanted(exported):
    with Running(exported, "--slots", "1", "--deadline", "0.05", "--no-ui") as server:
        assert is_problem(server.get("/"), 404)
        reply = server.post(picture("PNG", (5000, 4900), "L"), "image/png")
        assert is_problem(reply, 503)
        assert reply.json["detail"] == "No response within 0.05 seconds."
        assert "retry-after" in reply.headers


def test_not_ready_before_the_model_is_loaded(exported, tmp_path):
    """The graph comes through a pipe, so that the load waits for us."""
    folder = tmp_path / "export"
    shutil.copytree(exported, folder)
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").unlink()
    os.mkfifo(folder / "model.onnx")
    with Running(folder, wait=False) as server:
        for reply in (server.get("/ping"), server.post(b"x")):
            assert is_problem(reply, 503)
            assert "retry-after" in reply.headers
        assert server.get("/metrics").status == 200
        (folder / "model.onnx").write_bytes(content)
        wait_until(lambda: server.get("/ping").status == 200)


def test_sigterm_under_load_loses_nothing(exported, photo):
    """Eight clients, one connection a request, and one that is refused late: each
    request that the server read is answered, and no process stays. A connection may be
    reset before, in the moment in which the port closes.
    """
    reset: list[str] = []
    answered: Counter[int] = Counter()
    stop = threading.Event()
    with Running(exported) as server:

        def client() -> None:
            message = (
                b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-type:"
                b" image/jpeg\r\ncontent-length: %d\r\n\r\n"
            )
            while not stop.is_set():
                try:
                    connection = socket.create_connection(
                        (server.host, server.port), timeout=20
                    )
                except (
                    OSError
                ):  # refused: the server did not take it, so that it is not lost
                    return
                with connection:
                    try:
                        connection.sendall(message % len(photo) + photo)
                        answer = connection.recv(65536)
                        answered[int(answer.split(b" ", 2)[1])] += 1
                    except (OSError, IndexError) as error:
                        reset.append(repr(error))
                        return

        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        with socket.create_connection(
            (server.host, server.port), timeout=20
        ) as refused:
            refused.sendall(
                b"POST /ping HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            assert refused.recv(100).startswith(b"HTTP/1.1 405 ")
            refused.sendall(
                500 * b"1\r\nx\r\n"
            )  # once this ended the server with a traceback, if it came last
            time.sleep(0.7)
            begin = time.monotonic()
            assert server.stop() == 0, server.errors
        seconds = time.monotonic() - begin
        stop.set()
        for thread in threads:
            thread.join(30)
        pid = server.pid
    assert len(reset) < len(threads)
    assert set(answered) == {200}
    assert answered[200] == server.errors.count(" invocations 200 ")
    assert "not answered" not in server.errors
    assert answered[200] > 20
    assert seconds < 10
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert "ending: " in server.errors


@pytest.mark.parametrize(
    "keep_alive", [False, True], ids=["a connection a request", "kept connections"]
)
def test_clients_that_leave_while_health_fails_are_not_refused(
    exported, photo, keep_alive
):
    """Eight clients ask for health before each image, as a load balancer does for them,
    and leave when it is 503.
    """
    failed: list[str] = []
    departures: list[float] = []
    late: Counter[int] = Counter()
    with Running(exported, "--drain", "2") as server:
        ended = threading.Event()

        def client(number: int) -> None:
            connection = http.client.HTTPConnection(
                server.host, server.port, timeout=20
            )
            try:
                while (
                    not departures or number % 2
                ):  # every other one stays 0.7 s longer than the first that left
                    connection.request("GET", "/ping")
                    health = connection.getresponse()
                    health.read()
                    if health.status != 200:
                        departures.append(time.monotonic())
                        if not number % 2 or time.monotonic() > min(departures) + 0.7:
                            return
                    connection.request(
                        "POST", "/invocations", photo, {"content-type": "image/jpeg"}
                    )
                    answer = connection.getresponse()
                    answer.read()
                    late[answer.status] += ended.is_set()
                    if answer.status != 200:
                        failed.append(str(answer.status))
                    if not keep_alive:
                        connection.close()
            except (OSError, http.client.HTTPException) as error:
                failed.append(repr(error))
            finally:
                connection.close()

        threads = [
            threading.Thread(target=client, args=(number,)) for number in range(8)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        ended.set()
        for thread in threads:
            thread.join(20)
        assert server.wait() == 0
        seconds = time.monotonic() - begin
    assert not failed
    assert late[200] > 8
    assert min(departures) < begin + 1  # health fails at once
    assert 2 <= seconds < 15


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGINT]])
def test_ctrl_c_waits_for_no_load_balancer(exported, signals):
    with Running(exported, "--drain", "60") as server:
        for number in signals:
            server.process.send_signal(number)
            time.sleep(0.3)
        assert server.wait(20) == 0


def test_a_request_has_the_id_that_the_client_gave_it(server, photo):
    for identity in ("7f9c-1.a:b", "x" * 64):
        assert (
            server.post(photo, x_request_id=identity).headers["x-request-id"]
            == identity
        )
        assert (
            server.post(b"x", x_request_id=identity).headers["x-request-id"] == identity
        )
    for identity in ("", "x" * 65, "two words", "caf\u00e9"):
        assert re.fullmatch(
            "[0-9a-f]{16}",
            server.post(photo, x_request_id=identity).headers["x-request-id"],
        )


@pytest.mark.parametrize("form", ["json", "text"])
def test_the_log_says_what_happened_and_nothing_that_was_sent(exported, photo, form):
    with Running(exported, "--log-format", form) as server:
        server.post(photo, "image/jpeg", x_request_id="one", secret_header="hunter2")
        server.post(
            b"hunter2" * 10,
            "image/png",
            path="/invocations?token=hunter2",
            x_request_id="two",
        )
        server.get("/hunter2")
        server.stop()
    assert "hunter2" not in server.errors
    if form == "text":
        assert re.search(
            r"invocations 200 [\d.]+ms \d+x\d+ RGB JPEG decode=[\d.]+ms infer=[\d.]+ms",
            server.errors,
        )
        assert re.search(r"invocations 415 ", server.errors)
        return
    lines = [json.loads(line) for line in server.errors.splitlines()]
    assert all(
        line["level"] == "INFO" and datetime.fromisoformat(line["time"]).tzinfo
        for line in lines
    )
    first, second, third = (line for line in lines if "request" in line)
    assert (first["request"], first["route"], first["status"]) == (
        "one",
        "invocations",
        200,
    )
    assert (second["request"], second["status"]) == ("two", 415)
    assert (third["route"], third["status"]) == ("other", 404)
    assert first["ms"] > 0
    assert "RGB JPEG" in first["message"]


# --------------------------------------------------------------------------------
# the command


def test_wrong_options_are_one_line_errors(refused, exported, tmp_path, command):
    assert refused("serve", tmp_path).startswith(
        f"export: '{tmp_path}' is not an export: it has no manifest.json."
    )
    assert refused("serve", exported, "--file", "other.onnx").startswith("--file: ")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        message = refused("serve", exported, "--port", port)
    assert (
        message
        == f"--port: cannot listen at 127.0.0.1:{port} (Address already in use). Choose"
        " another --port."
    )
    for wrong in (
        ["--max-body", "6 elephants"],
        ["--threads", "0"],
        ["--port", "99999"],
        ["--deadline", "-1"],
    ):
        assert command("serve", exported, *wrong).code == 2


def test_a_graph_that_was_changed_ends_the_server(exported, tmp_path):
    folder = Path(shutil.copytree(exported, tmp_path / "export"))
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content[:-1] + b"\0")
    with Running(folder, wait=False) as server:
        assert server.wait() == 2
    assert "sha256 differs" in server.errors.splitlines()[-1]


@pytest.mark.parametrize("port", ["http", "99999"])
def test_an_invalid_sagemaker_port_is_refused(refused, exported, monkeypatch, port):
    monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", port)
    assert f"'{port}' is not a whole number from 0 to 65535" in refused(
        "serve", exported
    )


def test_the_word_serve_is_sagemakers(command):
    """`docker run IMAGE serve`: the model lies at /opt/ml/model, which is not there on
    this machine.
    """
    if Path("/opt/ml/model").exists():
        pytest.skip("/opt/ml/model exists here")
    answer = command("serve", "serve")
    assert answer.code == 2
    assert answer.err.startswith(
        "export: '/opt/ml/model' is not an export: it has no manifest.json."
    )


def test_the_image_for_containers_has_a_user_a_fixed_base_and_a_health_check(exported):
    """No docker here: its user and base are read, and its health check is run against a
    server.
    """
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    instructions = [
        line.split(maxsplit=1) for line in lines if line and not line.startswith("#")
    ]
    (user,) = (arguments for name, arguments in instructions if name == "USER")
    assert all(number.isdecimal() for number in user.split(":")), (
        "Kubernetes' runAsNonRoot needs a number"
    )
    bases = [arguments for name, arguments in instructions if name == "FROM"]
    assert all(
        len(base.split(":")[1].split("-")[0].split(".")) == 3 for base in bases
    ), "a tag that moves"
    (health,) = (arguments for name, arguments in instructions if name == "HEALTHCHECK")
    program, *argv = json.loads(health.split(" CMD ")[1])
    assert program == "python"

    def healthy(port: int) -> bool:
        environment = {"SAGEMAKER_BIND_TO_PORT": str(port)}
        return (
            subprocess.run(
                [sys.executable, *argv], env=environment, capture_output=True
            ).returncode
            == 0
        )

    with Running(exported) as server:
        assert healthy(server.port)
    assert not healthy(server.port)


def test_a_reader_of_stderr_that_stalls_stops_nothing(exported, tmp_path):
    """Issue 49: before, the event loop stood in `write` after 64 KiB of log, and
    SIGTERM with it.
    """
    argv = [
        sys.executable,
        "-m",
        "kd.cli",
        "serve",
        str(exported),
        "--port",
        "0",
        "--threads",
        "1",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            address = process.stdout.readline().split(" at http://")[1].split()[0]
            host, port = address.rsplit(":", 1)
            connection = http.client.HTTPConnection(host, int(port), timeout=20)
            for _ in range(3000):  # a line of 60 bytes or more for each
                connection.request(
                    "POST", "/invocations", b"x", {"content-type": "text/plain"}
                )
                assert connection.getresponse().read()
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            connection.close()
            process.terminate()
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert (
        float(re.search(r"^kd_log_lines_dropped_total (\S+)$", text, re.MULTILINE)[1])
        > 0
    )


@pytest.mark.slow
@pytest.mark.skipif(not installed("openvino"), reason="needs the extra openvino")
def test_openvino_with_two_slots_ends_at_any_sigterm(distilled, tmp_path):
    """Issue 49: before, two first answers at once waited for each other, and an end
    while a graph loads was SIGABRT.
    """
    export(distilled, tmp_path / "export", ExportOptions(openvino=True))
    moments = np.random.default_rng(0).uniform(0, 2, 6)
    for moment in moments:
        server = Running(
            tmp_path / "export",
            "--file",
            "openvino.xml",
            "--threads",
            "2",
            "--slots",
            "2",
            wait=False,
        )
        time.sleep(moment)
        assert server.stop() == 0, (moment, server.errors)


def test_an_export_that_fails_the_self_check_is_not_ready(exported, tmp_path):
    """Its last layer's weights are those of a later step; hashes and checksum are made
    to fit.
    """
    folder = with_other_weights(exported, tmp_path / "export")
    with Running(folder, wait=False) as server:
        wait_until(lambda: "differ" in server.get("/ping").json["detail"])
        ping = server.get("/ping")
        assert ping.status == server.post(b"").status == 503
        assert re.search(
            r"largest difference .*, .* is allowed; onnxruntime .* here, .* there",
            ping.json["detail"],
        )
        assert "\nkd_self_check 0.0\n" in server.get("/metrics").body.decode()
    assert server.stop() == 0
    assert "not ready" in server.errors
    with Running(folder, "--no-self-check") as server:
        assert server.get("/ping").status == 200
    assert "the self-check is off" in server.errors
