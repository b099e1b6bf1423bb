"""What the client does when an endpoint, or a proxy before it, says that it is busy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kd.serve import client


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


@pytest.fixture
def busy() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(20)


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
