"""What the client does when an endpoint, or a proxy before it, says that it is busy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kd.core.errors import KdError
from kd.deploy.serve import client


class Busy(BaseHTTPRequestHandler):
    """A proxy that is busy twice, once in JSON and once in HTML."""

    asked = 0

    def do_POST(self) -> None:
        type(self).asked += 1
        self.rfile.read(int(self.headers["content-length"]))
        body = {1: b"{}", 2: b"<html>busy</html>"}.get(self.asked, b'{"predictions": []}')
        self.send_response(503 if self.asked < 3 else 200)
        if self.asked < 3:
            self.send_header("retry-after", "0")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *rest: object) -> None:
        """Say nothing."""


class Stranger(Busy):
    """Another service, which answers whatever it is asked."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "15")
        self.end_headers()
        self.wfile.write(b'{"status":"ok"}')


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(20)


@pytest.fixture
def busy() -> Iterator[str]:
    with serving(Busy) as url:
        yield url


def test_another_service_is_one_line(tmp_path):
    (tmp_path / "fig").mkdir()
    (tmp_path / "fig/1.jpg").write_bytes(b"image")
    with serving(Stranger) as url, pytest.raises(KdError, match="is not kd-serve"):
        client.evaluate(url, tmp_path)


def test_an_image_that_is_gone_is_one_line(tmp_path):
    (tmp_path / "fig").mkdir()
    (tmp_path / "fig/1.jpg").symlink_to("nowhere")
    with pytest.raises(KdError, match=r"^--data: '.*1\.jpg' cannot be read"):
        client.evaluate("http://127.0.0.1:9", tmp_path)


def test_a_proxy_that_is_busy(busy):
    endpoint = client.Endpoint(busy)
    try:
        assert endpoint.classify(b"image") == (200, {"predictions": []})
    finally:
        endpoint.close()
    assert Busy.asked == 3


def test_a_picture_of_any_ending_is_counted(tmp_path):
    for name in ("a/1.JPG", "a/2.gif", "a/b/3.tiff", "a/notes.txt", "4.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = sorted((path.relative_to(tmp_path).as_posix(), label) for path, label in client._listing(tmp_path))
    assert found == [("a/1.JPG", "a"), ("a/2.gif", "a"), ("a/b/3.tiff", "a/b")]
