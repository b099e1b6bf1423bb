"""Limits on requests, and error responses as application/problem+json (RFC 9457)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from kd.core.options import (
    option,
    parse_pixels,
    parse_positive,
    parse_size,
    whole_number,
)
from kd.files.pixels import MAX_SCANS, Most

MIB = 2**20  # bytes
BODY = 25 * MIB  # a phone's JPEG of 48 megapixels has 8 to 15 MB
SAGEMAKER_BODY = 6 * MIB  # of its real-time endpoints
PROBLEM = "application/problem+json"
JPEG_FACTOR = 2.56
"""64 million pixels by default: phones have 48 and 50. With coefficients and decoded at
an eighth of its sides such a JPEG takes the memory of 25 million pixels: 64 x 3 / 8 +
64 / 64.
"""
RETRY_SECONDS = 1  # seconds in Retry-After: the smallest positive integer


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of requests and connections; beyond them a request gets 4xx or 503."""

    max_body: int = option(BODY, "SIZE", parse_size)
    """largest request body (default 25MiB; 6MiB as `serve`, as of SageMaker's real-time
    endpoints)
    """
    max_pixels: int = option(25_000_000, "N", parse_pixels)
    """most pixels of an image in memory (default 25e6); a JPEG, decoded at a reduced
    size, may have 2.56 times that
    """
    max_images: int = option(16, "N", whole_number(1, 1024))
    """most images per request (default 16)"""
    min_side: int = 4
    max_aspect: float = 20.0  # longer side over shorter side
    max_scans: int = MAX_SCANS
    max_in_flight: int = option(32, "N", whole_number(1, 65536))
    """most requests computed or waiting for a thread, their bodies complete; further
    ones get 503 (default 32)
    """
    max_buffered: int = option(128 * MIB, "SIZE", parse_size)
    """most bytes of all request bodies in memory (default 128MiB); further requests get
    503
    """
    max_connections: int = 8192
    """Connections open at once. Chosen: above the 2,000 of the attack that was
    measured, which took 5 MB.
    """
    max_header_bytes: int = 65_536  # of one request; hyper's buffer of a connection
    idle_seconds: float = option(75.0, "S", parse_positive, flag="--keep-alive")
    """seconds that a connection stays open before the header of its next request is
    complete (default 75, longer than the 60 of common proxies)
    """
    body_seconds: float = option(10.0, "S", parse_positive, flag="--body-timeout")
    """seconds from the end of the headers to the end of the body (default 10)"""
    deadline: float = option(10.0, "S", parse_positive)
    """seconds from the end of the body to the response (default 10)"""
    drain_seconds: float = option(0.0, "S", whole_number(0, 3600), flag="--drain")
    """seconds from SIGTERM until the port closes; /ping gets 503, requests are served
    (default 5 as `serve`, else 0.5; Ctrl-C: always 0.5)
    """
    end_seconds: float = 25.0
    """Seconds from the closing of the port to the end of the process. SageMaker and
    Kubernetes kill 30 s after SIGTERM.
    """

    full_images: int = 2
    """Most images of the largest size per request, or the same pixels in more images:
    limits CPU time.
    """

    @property
    def max_jpeg(self) -> int:
        """Most pixels of a JPEG, which is decoded at reduced size."""
        return int(JPEG_FACTOR * self.max_pixels)

    def of(self, kind: str | None) -> Most:
        """Return the limits for images of a format."""
        max_pixels = self.max_jpeg if kind == "JPEG" else self.max_pixels
        return Most(max_pixels, self.max_scans, self.min_side, self.max_aspect)


# limits for local images: `kd.load`, kd-predict, kd-verify
LOCAL = Limits(max_pixels=100_000_000)


class Problem(Exception):
    """An error response: a status, and one or two sentences for the client.

    `client_detail` is the detail with the client's names, which are never logged.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        headers: Mapping[str, str] = {},
        client_detail: str = "",
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = dict(headers)
        self.client_detail = client_detail or detail

    def copy(self) -> "Problem":
        """Return it without its traceback.

        The frames would hold the request, and its connection, in a cycle.
        """
        return Problem(self.status, self.detail, self.headers, self.client_detail)

    @property
    def body(self) -> bytes:
        content = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.client_detail,
            "message": self.client_detail,  # AWS's clients show no other key
        }
        return json.dumps(content).encode()


def hung_up() -> Problem:
    """Return the 400 for a client that left, which is counted and never received."""
    detail = "The client hung up, or its body is not valid HTTP."
    return Problem(400, detail, {"connection": "close"})


def no_memory() -> Problem:
    """Return the 503 for a request that raised MemoryError."""
    return busy("There is not enough free memory for this request now.")


def busy(detail: str) -> Problem:
    """Return a 503 with a Retry-After header."""
    return Problem(503, detail, {"retry-after": str(RETRY_SECONDS)})
