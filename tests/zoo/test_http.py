"""Requests as programs make them, against one real server: each has the right answer,
or an error of one line.

A case says what RFC 9110 (HTTP), 9112 (HTTP/1.1), 7578 (forms) or 4648 (base64) and the
docs want; the sections stand beside it.
"""

from __future__ import annotations

import base64
import gzip
import http.client
import io
import json
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pieces import wait_until
from PIL import Image, features

from kd.deploy.serve.limits import Limits
from kd.deploy.serve.metrics import Metrics
from kd.deploy.shift import Reference, ShiftWatch

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
from serving import Reply, Running

HEIF = find_spec("pillow_heif") is not None
STATE = SimpleNamespace(ready=True, in_progress=0, buffered=0)


@dataclass(frozen=True)
class Files:
    """What the requests carry."""

    photo: bytes  # a JPEG whose base64 has "+" and "/"

    @property
    def text(self) -> str:
        return base64.b64encode(self.photo).decode()


@dataclass(frozen=True)
class Case:
    """One request, and what is right."""

    name: str
    status: int
    detail: str = ""  # a pattern that the detail of an error matches
    body: Callable[[Files], bytes] = lambda files: files.photo
    kind: str = "image/jpeg"
    headers: tuple[tuple[str, str], ...] = ()
    target: str = "/invocations"
    method: str = "POST"
    answers: int = 1
    top: int = 3
    has: tuple[str, str] = ("", "")  # a header of the answer and its value


def document(make: Callable[[Files], object]) -> Callable[[Files], bytes]:
    return lambda files: json.dumps(make(files)).encode()


def text(make: Callable[[Files], str]) -> Callable[[Files], bytes]:
    return document(lambda files: {"image": make(files)})


def form(*fields: tuple[str, Callable[[Files], bytes]]) -> Callable[[Files], bytes]:
    """Return a form; of each part the header lines without the name of the first, and
    its content.
    """

    def body(files: Files) -> bytes:
        encoded = (
            f"--x\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode()
            + of(files)
            for head, of in fields
        )
        return b"\r\n".join([*encoded, b"--x--\r\n"])

    return body


def photo(files: Files) -> bytes:
    return files.photo


def field(value: str) -> Callable[[Files], bytes]:
    return lambda files: value.encode()


def wrapped(text: str, end: str) -> str:
    return end.join(text[i : i + 76] for i in range(0, len(text), 76)) + end


def heic(files: Files, kind: str = "HEIF") -> bytes:
    """Return the photo as HEIC or AVIF; or, where nothing here writes it, the first
    bytes of such a file.
    """
    brand = b"heic" if kind == "HEIF" else b"avif"
    if kind == "HEIF" and HEIF:
        import pillow_heif

        pillow_heif.register_heif_opener()
    elif kind == "HEIF" or not features.check("avif"):
        return b"\0\0\0\x18ftyp" + brand + b"\0" * 100
    file = io.BytesIO()
    Image.open(io.BytesIO(files.photo)).save(file, kind)
    return file.getvalue()


GZIP = (("Content-Encoding", "gzip"),)
JSON = "application/json"
FORM = "multipart/form-data; boundary=x"
PHOTO = 'name="file"; filename="a.jpg"\r\nContent-Type: image/jpeg'
BROKEN = b"\xff\xd8\xff\xe0 damaged"
ACCEPTS = "Allowed are .*image/jpeg"
CASES = [
    # JSON. RFC 8259 4: names within an object should be unique; what is dropped in
    # silence is lost.
    Case("json", 200, body=text(lambda f: f.text), kind=JSON),
    Case("json, two", 200, body=document(lambda f: {"images": [f.text] * 2}), kind=JSON, answers=2),
    Case("image and images", 400, "both", document(lambda f: {"image": f.text, "images": [f.text]}), JSON),
    Case("image twice", 400, "twice", lambda f: f'{{"image": "{f.text}", "image": "{f.text}"}}'.encode(), JSON),
    Case("top in JSON", 200, body=document(lambda f: {"image": f.text, "top": 2}), kind=JSON, top=2),
    Case("top in JSON that is none", 400, "top", document(lambda f: {"image": f.text, "top": [2]}), JSON),
    Case("json lines", 400, "JSON lines", lambda f: 2 * (text(photo_text)(f) + b"\n"), JSON),
    Case("a byte order mark", 200, body=lambda f: b"\xef\xbb\xbf" + text(photo_text)(f), kind=JSON),
    # RFC 2397: what a browser's FileReader returns.
    Case("data url", 200, body=text(lambda f: f"data:image/jpeg;base64,{f.text}"), kind=JSON),
    Case("data url, other case", 200, body=text(lambda f: f"DATA:image/jpeg;name=a.jpg;BASE64,{f.text}"), kind=JSON),
    Case("data url, not base64", 400, "base64", text(lambda f: "data:image/svg+xml,%3Csvg/%3E"), JSON),
    Case("data urls", 200, body=document(lambda f: {"images": [f"data:;base64,{f.text}"] * 2}), kind=JSON, answers=2),
    # RFC 4648 3.1: line feeds as `base64` and MIME write them; 5: the alphabet that is
    # safe in a URL; 3.2: padding.
    Case("base64 in lines", 200, body=text(lambda f: wrapped(f.text, "\n")), kind=JSON),
    Case("base64 in lines of MIME", 200, body=text(lambda f: wrapped(f.text, "\r\n")), kind=JSON),
    Case("base64 for URLs", 200, body=text(lambda f: base64.urlsafe_b64encode(f.photo).decode()), kind=JSON),
    Case("base64 without padding", 400, "padding", text(lambda f: base64.b64encode(f.photo[:100]).decode()[:-2]), JSON),
    Case("an address", 400, "not fetched", text(lambda f: "https://example.org/dish.jpg"), JSON),
    Case("base64 twice", 415, "not an image", text(lambda f: base64.b64encode(f.text.encode()).decode()), JSON),
    # Which of several is wrong.
    Case(
        "the second of three is damaged", 400, "^image 2 of 3: ", kind=JSON,
        body=document(lambda f: {"images": [f.text, base64.b64encode(BROKEN).decode(), f.text]}),
    ),
    Case("the third of three is no base64", 400, "^image 3 of 3: ",
         document(lambda f: {"images": [f.text, f.text, "%%"]}), JSON),
    Case("the second of two is no text", 400, "^image 2 of 2: ", document(lambda f: {"images": [f.text, None]}), JSON),
    # Forms, RFC 7578 4.2: a file has a filename; a text field has none. HTML: an empty
    # file input has an empty one.
    Case("form", 200, body=form((PHOTO, photo)), kind=FORM),
    Case("form, two", 200, body=form((PHOTO, photo), (PHOTO, photo)), kind=FORM, answers=2),
    Case("form with a token", 200, body=form(('name="csrf"', field("hunter2")), (PHOTO, photo)), kind=FORM),
    Case("form with top", 200, body=form((PHOTO, photo), ('name="top"', field("2"))), kind=FORM, top=2),
    Case("form with an empty top", 200, body=form((PHOTO, photo), ('name="top"', field(""))), kind=FORM),
    Case("form with top that is none", 400, "top", form((PHOTO, photo), ('name="top"', field("all"))), FORM),
    Case("top said twice", 400, "top", form((PHOTO, photo), ('name="top"', field("2"))), FORM,
         target="/invocations?top=3"),
    Case("top twice in the query", 400, "top", target="/invocations?top=3&top=2"),
    Case(
        "form with an empty second input", 200, kind=FORM,
        body=form((PHOTO, photo), ('name="b"; filename=""\r\nContent-Type: application/octet-stream', field(""))),
    ),
    Case("form with a file of 0 bytes", 400, "^'b.png', image 2 of 2: .*empty",
         form((PHOTO, photo), ('name="b"; filename="b.png"', field(""))), FORM),
    Case("form with a damaged file", 400, "^'b.png', image 2 of 2: .*damaged",
         form((PHOTO, photo), ('name="b"; filename="b.png"', lambda f: BROKEN)), FORM),
    Case("form with a file that is no image", 415, "^'a.txt', image 1 of 2: ",
         form(('name="b"; filename="a.txt"\r\nContent-Type: text/plain', field("hello")), (PHOTO, photo)), FORM),
    Case("form of text alone", 400, "no image.*'csrf', 'note'",
         form(('name="csrf"', field("x")), ('name="note"', field("y"))), FORM),
    Case("form, cut in its second file", 400, "cut short",
         lambda f: form((PHOTO, photo), (PHOTO, photo))(f)[:-200], FORM),
    Case("form without its last boundary", 400, "cut short", lambda f: form((PHOTO, photo))(f)[:-9], FORM),
    Case("form without its last hyphens", 400, "cut short", lambda f: form((PHOTO, photo))(f)[:-4], FORM),
    Case("form, a part without a name", 400, "without a name",
         lambda f: b"--x\r\nX-A: hunter2\r\n\r\nb\r\n--x--\r\n", FORM),
    Case("form, a type alone", 200, body=form(('name="file"\r\nContent-Type: image/jpeg', photo)), kind=FORM),
    Case("form, a part with a name alone", 200, body=form(('name="file"', photo)), kind=FORM),
    Case("form, a name of RFC 5987", 200, body=form(("name=file; filename*=UTF-8''%C3%A9.jpg", photo)), kind=FORM),
    Case("form, a boundary in quotes", 200, body=form((PHOTO, photo)), kind='multipart/form-data;a=b; boundary="x"'),
    # RFC 9110 5.6.6: names of parameters ignore case, and are whole words.
    Case("form, Boundary", 200, body=form((PHOTO, photo)), kind="multipart/form-data; Boundary=x"),
    Case("form, x-boundary", 200, body=form((PHOTO, photo)), kind="multipart/form-data; x-boundary=y;boundary=x"),
    Case("form, x-boundary alone", 400, "boundary", form((PHOTO, photo)), "multipart/form-data; x-boundary=x"),
    Case("form, urlencoded", 415, ACCEPTS, field("image=abc"), "application/x-www-form-urlencoded"),
    # RFC 9110 8.4: codings of the content; 15.5.16: 415 says which are accepted.
    Case("gzip", 200, body=lambda f: gzip.compress(f.photo), headers=GZIP),
    Case("gzip of JSON", 200, body=lambda f: gzip.compress(text(photo_text)(f)), kind=JSON,
         headers=(("Content-Encoding", "GZIP"),)),
    Case("x-gzip", 200, body=lambda f: gzip.compress(f.photo), headers=(("Content-Encoding", "x-gzip"),)),
    Case("gzip in two members", 400, "member", lambda f: 2 * gzip.compress(f.photo), headers=GZIP),
    Case("identity", 200, headers=(("Content-Encoding", "identity"),)),
    Case("gzip of too much", 413, "larger", lambda f: gzip.compress(bytes(26 * 2**20)),
         headers=GZIP),
    Case("gzip that is cut", 400, "gzip", lambda f: gzip.compress(f.photo)[:-9], headers=GZIP),
    Case("gzip that is none", 400, "gzip", headers=GZIP),
    Case("br", 415, "coding", headers=(("Content-Encoding", "br"),), has=("accept-encoding", "gzip, identity")),
    Case("gzip twice", 415, "coding", headers=(("Content-Encoding", "gzip, gzip"),),
         has=("accept-encoding", "gzip, identity")),
    Case("gzip in two lines", 415, "coding", headers=(("Content-Encoding", "gzip"), ("Content-Encoding", "gzip"))),
    # Types. RFC 9110 8.3: what says nothing is told by its content.
    Case("octet-stream", 200, kind="application/octet-stream"),
    Case("octet-stream that is no image", 415, "not an image", field("hello"), "application/octet-stream"),
    Case("pjpeg", 200, kind="image/pjpeg"),
    Case("x-png", 200, kind="image/x-png"),
    Case("no type", 200, kind=""),
    Case("no type and no image", 415, "not an image", field("hello"), ""),
    Case("heic", 200 if HEIF else 415, "" if HEIF else r"HEIC.*kd\[heic\]", heic, "image/heic"),
    Case("heif", 200 if HEIF else 415, "" if HEIF else r"HEIC.*kd\[heic\]", heic, "image/heif"),
    Case("heic as an image", 200 if HEIF else 415, "" if HEIF else r"HEIC.*kd\[heic\]", heic, "application/x-image"),
    Case("avif", 415, "AVIF", lambda f: heic(f, "AVIF"), "image/avif"),
    Case("svg", 415, ACCEPTS, field("<svg/>"), "image/svg+xml"),
    # RFC 9110 5.3: lines of one name are one list; 12.5.1.
    Case("two accept lines", 200, headers=(("Accept", "text/html"), ("Accept", "application/json"))),
    Case("an empty accept line", 200, headers=(("Accept", ""), ("Accept", "application/json"))),
    Case("two accept lines of nothing", 406, "text/csv", headers=(("Accept", "text/html"), ("Accept", "image/png"))),
    # Targets. RFC 9112 3.2.2: a server must accept the absolute form; 9110 4.1: a path
    # is not its neighbour.
    Case("absolute form", 200, target="http://kd.example:8080/invocations"),
    Case("absolute form, query", 200, target="HTTP://kd.example/invocations?top=2", top=2),
    Case("absolute form, no path", 405, "method", target="http://kd.example"),
    Case("a slash at the end", 200, target="/invocations/"),
    Case("a slash at the end, query", 200, target="/invocations/?top=2", top=2),
    Case("boto3's path", 200, target="/endpoints/vit_food/invocations"),
    Case("a path that is none", 404, "/invocations", target="/predict"),
    Case("a method that is none", 405, "method", method="PUT", has=("allow", "POST")),
    Case("options", 405, "method", method="OPTIONS", has=("allow", "POST")),
    # RFC 9110 7.8: an upgrade may be ignored; 15.5.15 and RFC 6585 5: what is too long
    # is said.
    Case("h2c", 200, headers=(("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AA"))),
    Case("websocket", 200, headers=(("Connection", "Upgrade"), ("Upgrade", "websocket"))),
    Case("a header of 20 kB", 200, headers=(("Cookie", "a" * 20_000),)),
    Case("a header of 140 kB", 431, headers=(("Cookie", "a" * 140_000),)),
    Case("101 header lines", 431, headers=tuple((f"a{i}", "b") for i in range(101))),
    Case("a target of 70 kB", 414, target="/invocations?" + "a" * 70_000),
    Case("a long query", 400, "query", target="/invocations?" + "a" * 300),
]  # fmt: skip


def photo_text(files: Files) -> str:
    return files.text


@pytest.fixture(scope="module")
def server(exported):
    with Running(exported) as running:
        yield running
        assert running.stop() == 0, running.errors
    lines = running.errors.splitlines()
    assert not [line for line in lines if " INFO kd.serve " not in line], (
        "a warning, a traceback or a bug"
    )
    assert "hunter2" not in running.errors, "the log has what a client sent"


@pytest.fixture(scope="module")
def files(photos, server) -> Files:
    images = {
        path.parent.name: path.read_bytes()
        for path in sorted((photos / "val").rglob("*.jpg"))
    }
    several = [
        data
        for data in images.values()
        if {"+", "/"} <= set(base64.b64encode(data).decode())
    ]
    return Files(several[0])


def send(server: Running, case: Case, body: bytes, identity: str) -> Reply:
    """Write the request as it stands, also what no client library would write, and read
    the answer.
    """
    lines = [
        f"{case.method} {case.target} HTTP/1.1",
        "Host: kd",
        f"Content-Length: {len(body)}",
    ]
    lines += [f"Content-Type: {case.kind}"] * bool(case.kind) + [
        f"X-Request-Id: {identity}"
    ]
    lines += [f"{name}: {value}" for name, value in case.headers]
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return reply_of(connection, case.method)


def reply_of(connection: socket.socket, method: str = "POST") -> Reply:
    with closing(http.client.HTTPResponse(connection, method=method)) as response:
        response.begin()
        return Reply(
            response.status,
            {key.lower(): value for key, value in response.getheaders()},
            response.read(),
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_request_is_answered_or_refused_with_its_reason(case, server, files):
    expected = server.post(files.photo, path=f"/invocations?top={case.top}").json[
        "predictions"
    ][0]
    identity = re.sub("[^a-z0-9]", "-", case.name)[:60]
    reply = send(server, case, case.body(files), identity)
    assert reply.status == case.status, reply
    if case.status == 200:
        predictions = reply.json["predictions"]
        if case.body is heic:  # another codec: other pixels
            assert predictions[0]["label"] == expected["label"]
        else:
            assert predictions == [expected] * case.answers
    elif (
        not case.detail
    ):  # the server's own refusal, before the application sees the request
        assert (reply.body, reply.headers["connection"]) == (b"", "close")
        return
    else:
        content = reply.json
        assert reply.headers["content-type"] == "application/problem+json"
        assert set(content) == {"type", "title", "status", "detail", "message"}
        assert content["detail"] == content["message"], "boto3 shows `message`"
        assert re.search(case.detail, content["detail"]), content
        assert "\n" not in content["detail"]
    name, value = case.has
    assert not name or reply.headers[name] == value
    assert reply.headers["x-request-id"] == identity


# --------------------------------------------------------------------------------
# what is seen beside answers


def lines_of(text: str, name: str) -> dict[str, float]:
    """Return the samples of a metric by their labels."""
    return {
        key: float(value)
        for key, value in re.findall(rf"^{name}(\{{.*\}}|) (\S+)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize(
    ("sent", "route", "status"),
    [
        (
            (
                b"GET /hunter2 HTTP/1.1\r\nHost: kd\r\nX-Request-Id:"
                b" seen\r\nConnection: close\r\n\r\n"
            ),
            "other",
            404,
        ),
        (
            (
                b"GET /invocations HTTP/1.1\r\nHost: kd\r\nX-Request-Id:"
                b" seen\r\nConnection: close\r\n\r\n"
            ),
            "other",
            405,
        ),
        (
            (
                b"POST /ping HTTP/1.1\r\nHost: kd\r\nX-Request-Id: seen\r\nConnection:"
                b" close\r\n\r\n"
            ),
            "other",
            405,
        ),
        (
            (
                b"GET / HTTP/1.1\r\nHost: kd\r\nX-Request-Id: seen\r\nConnection:"
                b" close\r\n\r\n"
            ),
            "page",
            200,
        ),
    ],
)
def test_a_refusal_is_logged_counted_and_has_an_id(exported, sent, route, status):
    """Before, 404 and 405 had no line and no count, and lost the request's id."""
    key = f'{{route="{route}",status="{status}"}}'
    with Running(exported) as server:
        answer = server.raw(sent)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        identity = re.search(rb"\r\nx-request-id: (\S+)\r\n", answer)
        assert identity
        assert (identity[1] == b"seen") == (b"seen" in sent)
        assert lines_of(server.get("/metrics").body.decode(), "kd_requests_total") == {
            key: 1
        }
        server.stop()
    (line,) = [
        line for line in server.errors.splitlines() if f" {route} {status} " in line
    ]
    assert f" INFO kd.serve {identity[1].decode()} " in line
    assert "WARNING" not in server.errors
    assert "hunter2" not in server.errors


def test_health_checks_have_their_id_and_no_line(exported):
    with Running(exported) as server:
        for path in ("/ping", "/metrics", "/ping/"):
            assert (
                server.call("GET", path, x_request_id="mine").headers["x-request-id"]
                == "mine"
            )
        assert not lines_of(server.get("/metrics").body.decode(), "kd_requests_total")
        server.stop()
    assert "mine" not in server.errors


def test_a_client_that_hangs_up_has_a_line(exported):
    head = (
        b"POST /invocations HTTP/1.1\r\nHost: kd\r\nX-Request-Id: gone\r\nContent-Type:"
        b" image/png\r\n"
    )
    with Running(exported) as server:
        with socket.create_connection(
            (server.host, server.port), timeout=10
        ) as connection:
            connection.sendall(head + b"Content-Length: 100\r\n\r\n12345")
        key = '{route="invocations",status="400"}'
        wait_until(
            lambda: (
                lines_of(server.get("/metrics").body.decode(), "kd_requests_total").get(
                    key
                )
                == 1
            )
        )
        server.stop()
    assert re.search(r"INFO kd\.serve gone invocations 400 .* hung up", server.errors)


def test_pipelined_requests_are_answered_in_order(server):
    """RFC 9112 9.3.2."""
    asks = b"GET /ping HTTP/1.1\r\nHost: kd\r\nX-Request-Id: first\r\n\r\n"
    asks += (
        b"GET /ping HTTP/1.1\r\nHost: kd\r\nX-Request-Id: second\r\nConnection:"
        b" close\r\n\r\n"
    )
    answer = server.raw(asks)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert re.findall(rb"\r\nx-request-id: (\S+)\r\n", answer) == [b"first", b"second"]


@pytest.mark.parametrize(("seconds", "stays_open"), [("1", False), ("20", True)])
def test_how_long_an_idle_connection_is_kept(exported, seconds, stays_open):
    """Before, it was the 10 s for headers; a proxy that keeps its own for 60 s then
    writes to a closed one.
    """
    assert Limits().idle_seconds == 75
    with Running(exported, "--keep-alive", seconds) as server:
        connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
        connection.request("GET", "/ping")
        connection.getresponse().read()
        connection.sock.settimeout(2.5)
        try:
            assert connection.sock.recv(1) == b""
            assert not stays_open
        except TimeoutError:
            assert stays_open
        connection.close()


def test_an_address_that_is_not_of_this_machine_is_refused(refused, exported):
    """192.0.2.1 is for documentation (RFC 5737). Before: "Choose another --port"."""
    for host in ("192.0.2.1", "no.such.host.invalid"):
        message = refused("serve", exported, "--host", host, "--port", "0")
        assert message.startswith(f"--host: cannot listen at {host}:0 (")
        assert message.endswith(
            "127.0.0.1, or 0.0.0.0 for all of them. Choose another --host."
        )


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"OPTIONS * HTTP/1.1\r\n%s\r\n", id="OPTIONS *, RFC 9110 9.3.7"),
        pytest.param(
            b"\r\nGET /ping HTTP/1.1\r\n%s\r\n", id="an empty line first, RFC 9112 2.2"
        ),
    ],
)
def test_a_server_must_answer(sent, server):
    assert re.match(
        rb"HTTP/1\.1 20[04] ", server.raw(sent % b"Host: kd\r\nConnection: close\r\n")
    )


def test_a_phones_picture_of_48_megapixels_is_answered(server):
    """Its JPEG has 8 to 15 MB; SageMaker's limit is 6 MiB."""
    noise = np.random.default_rng(0).integers(0, 256, (2600, 3000, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=95)
    assert 8_000_000 < len(file.getvalue()) < 15_000_000
    assert server.post(file.getvalue(), "image/jpeg").status == 200


def head(body: bytes) -> bytes:
    lines = (
        b"POST /invocations HTTP/1.1\r\nHost: kd\r\nContent-Type:"
        b" image/jpeg\r\nContent-Length: %d\r\n\r\n"
    )
    return lines % len(body)


@pytest.mark.xfail(
    strict=True, reason="hyper, granian's parser, takes half a close for a whole one"
)
def test_a_client_that_has_closed_its_side_gets_its_answer(server):
    """RFC 9112 9.6: half a close is none."""
    file = io.BytesIO()
    Image.new("RGB", (4000, 4000)).save(
        file, "PNG"
    )  # still being decoded when the side is closed
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.sendall(head(file.getvalue()) + file.getvalue())
        connection.shutdown(socket.SHUT_WR)
        assert reply_of(connection).status == 200


def accepts(server: Running) -> bool:
    try:
        socket.create_connection((server.host, server.port), timeout=1).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("place", ["in the metrics", "at the end"])
def test_requests_whose_bodies_arrive_are_in_progress(exported, files, place):
    half = len(files.photo) // 2
    with Running(exported) as server, ExitStack() as stack:
        uploads = [
            stack.enter_context(
                socket.create_connection((server.host, server.port), 20)
            )
            for _ in range(8)
        ]
        for upload in uploads:
            upload.sendall(head(files.photo) + files.photo[:half])

        def metric(name: str) -> float:
            return lines_of(server.get("/metrics").body.decode(), name)[""]

        wait_until(lambda: metric("kd_buffered_bytes") == 8 * half)
        if place == "in the metrics":
            assert metric("kd_in_flight") == 8
        server.process.terminate()
        if place == "at the end":  # it counts them when the port closes
            wait_until(lambda: not accepts(server))
        for upload in uploads:
            upload.sendall(files.photo[half:])
        assert [reply_of(upload).status for upload in uploads] == [200] * 8
        assert server.wait() == 0
        assert (
            place == "in the metrics"
            or "ending: 8 requests are in progress" in server.errors
        )


def test_a_hangup_of_the_terminal_ends_it_as_sigterm_does(exported, files):
    with Running(exported) as server:
        with socket.create_connection((server.host, server.port), timeout=20) as upload:
            upload.sendall(head(files.photo) + files.photo[:100])
            wait_until(
                lambda: (
                    lines_of(server.get("/metrics").body.decode(), "kd_buffered_bytes")[
                        ""
                    ]
                    == 100
                )
            )
            server.process.send_signal(signal.SIGHUP)
            time.sleep(0.5)
            try:
                upload.sendall(files.photo[100:])
                assert reply_of(upload).status == 200
            finally:
                code = server.wait()
        assert code == 0


def test_a_body_that_is_too_large_and_never_comes_is_told_so(exported):
    head = (
        b"POST /invocations HTTP/1.1\r\nHost: kd\r\nContent-Type:"
        b" image/png\r\nContent-Length: 99999999\r\n\r\n"
    )
    with Running(exported, "--body-timeout", "1") as server:
        assert server.raw(head).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT] * 2])
def test_a_header_that_is_never_complete_does_not_hold_the_end(exported, signals):
    """Before, an end took 25 s, while the log said that no request was in progress."""
    with (
        Running(exported) as server,
        socket.create_connection((server.host, server.port), timeout=10) as connection,
    ):
        connection.sendall(b"POST /invocations HTTP/1.1\r\nHost:")
        time.sleep(0.2)
        begin = time.monotonic()
        for number in signals:
            server.process.send_signal(number)
        assert server.wait() == 0
        assert time.monotonic() - begin < 10


def test_a_port_at_which_a_server_listens_is_refused(server, refused, exported):
    """granian alone would share it (SO_REUSEPORT), and each would answer a part of the
    requests.
    """
    message = refused("serve", exported, "--port", str(server.port))
    assert message.startswith(
        f"--port: cannot listen at 127.0.0.1:{server.port} (Address already in use)"
    )


# --------------------------------------------------------------------------------
# what is served


@pytest.mark.parametrize("depth", ["one folder too deep", "a run folder"])
def test_the_only_export_below_a_folder_is_served(exported, files, tmp_path, depth):
    """`tar czf model.tar.gz export/`, on a Mac: `._manifest.json` and `._export` beside
    the files that they are of.
    """
    shutil.copytree(exported, tmp_path / "export")
    if depth == "a run folder":  # it has a manifest of its own
        (tmp_path / "manifest.json").write_text('{"kd": "0"}')
    for name in ("._export", "export/._manifest.json", "export/._model.onnx"):
        (tmp_path / name).write_bytes(b"\0\5\26\7\0\2\0\0Mac OS X        ")
    with Running(tmp_path) as server:
        assert server.post(files.photo).status == 200


def test_two_exports_below_a_folder_are_named(refused, exported, tmp_path):
    for name in ("export", "export-teacher"):
        shutil.copytree(exported, tmp_path / name)
    message = refused("serve", tmp_path)
    assert message.startswith(
        f"export: '{tmp_path}' has 2 exports: 'export', 'export-teacher'. "
    )
    assert message.endswith(f"Name it: {tmp_path}/export.")


def test_metrics_of_ten_thousand_classes_stay_small_and_exact():
    """A series each were 650 kB at every scrape. The counts of the shift stay exact."""
    names = [f"Nomen longum speciei numero {i:05d}" for i in range(10_000)]
    watch = ShiftWatch(
        Reference.of(
            names,
            [(i, (0.5, 128.0, 4.0, 0.0, 0.0)) for i in range(10_000)],
            calibrated=True,
        )
    )
    for i, name in enumerate(names):
        for _ in range(1 + (i % 100 == 7)):
            watch.add({"top": [{"label": name, "score": 0.5}]}, (128.0, 4.0, 0.0, 0.0))
    metrics = Metrics("a", "b", STATE)
    metrics.watch_shift(watch)
    text = metrics.text().decode()
    assert len(text) < 200_000
    labels = lines_of(text, "kd_labels_total")
    assert labels == {f'{{label="{names[i]}"}}': 2 for i in range(7, 10_000, 100)}
    assert lines_of(text, "kd_labels_other") == {"": 9_900}
    assert lines_of(text, "kd_confidence_count") == {"": 10_100}
    assert watch.all.labels.sum(0).tolist() == [
        1 + (i % 100 == 7) for i in range(10_000)
    ]
