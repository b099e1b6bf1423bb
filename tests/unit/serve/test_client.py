"""What the client does when an endpoint, or a proxy before it, says that it is busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kd.serve import client


class Busy(BaseHTTPRequestHandler):
    """A proxy that is busy twice, once in JSON and once in HTML, with a date to come back at."""

    asked = 0

    def do_POST(self) -> None:
        type(self).asked += 1
        self.rfile.read(int(self.headers["content-length"]))
        body = {1: b"{}", 2: b"<html>busy</html>"}.get(self.asked, b'{"predictions": []}')
        self.send_response(503 if self.asked < 3 else 200)
        if self.asked < 3:
            self.send_header("retry-after", formatdate(usegmt=True))
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


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("0", 0), ("2", 2), (" 7 ", 7), ("999999999999", client.MAX_PAUSE), ("", 1), ("-5", 1), ("1.5", 1), ("nan", 1),
        ("soon", 1), ("Wed, 21 Oct 2015 07:28:00 GMT", 0), ("Wed, 21 Oct 2015 07:28:00 -0000", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", client.MAX_PAUSE), ("Wed, 99 Oct 2015 07:28:00 GMT", 1),
    ],
)  # fmt: skip
def test_pauses(header, seconds):
    assert client.pause(header) == seconds


def test_a_date_in_the_near_future():
    assert 3 < client.pause(formatdate(time.time() + 10, usegmt=True)) <= 10
