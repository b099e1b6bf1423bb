"""Error responses: application/problem+json (RFC 9457)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import Response

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 1  # in Retry-After, which has whole seconds: the shortest
CLIENT_GONE = 499  # the client disconnected. This status is counted in the metrics and never sent; no RFC defines it.


class Problem(Exception):
    """An error response: a status, and one or two sentences for the client."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] = {}) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, dict(headers)

    @property
    def body(self) -> bytes:
        title = "Client Closed Request" if self.status == CLIENT_GONE else HTTPStatus(self.status).phrase
        content = {"type": "about:blank", "title": title, "status": self.status, "detail": self.detail}
        return json.dumps(content).encode()

    def response(self) -> Response:
        return Response(self.body, self.status, self.headers, MEDIA_TYPE)


def no_memory() -> Problem:
    """Return the 503 for a request that raised MemoryError."""
    return busy("There is not enough free memory for this request now.")


def busy(detail: str) -> Problem:
    """Return a 503 with a Retry-After header."""
    return Problem(503, detail, {"retry-after": str(RETRY_SECONDS)})
