"""A page that is made anew for each visit, on this machine only."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOOPBACK = "127.0.0.1"


def server(make: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """Return a server of one page at `/`, bound to the loopback; the caller runs and closes it. Port 0: any free one.

    Raises:
        OSError: the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in (LOOPBACK, "localhost"):  # another site's name that resolves to this machine
                self.send_error(403)
            elif self.path.partition("?")[0] != "/":
                self.send_error(404)
            else:
                body = make().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a page that asks every few seconds would fill the terminal."""

    return ThreadingHTTPServer((LOOPBACK, port), Handler)
