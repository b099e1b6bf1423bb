"""Read the body of a request into memory, with limits on its size, on its time, and on all bodies together."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from kd.serve.problems import CLIENT_GONE, Problem, busy
from kd.serve.service import Service

DISCARD_FACTOR = 4
"""A body that is too large is read and discarded up to this many times `max_body`. Then the connection is closed."""


class RequestBody:
    """`async with RequestBody(request, service) as body`: the whole body, counted in `service.buffered` until the end.

    The body of a rejected request is also read to its end, and discarded. A client that is still writing when the
    connection closes gets a broken pipe and never reads the answer.
    """

    def __init__(self, request: Request, service: Service) -> None:
        self.request, self.service, self.limits = request, service, service.limits
        self._chunks: list[bytes] = []
        self._kept = 0
        self._refusal: Problem | None = None

    async def __aenter__(self) -> bytes:
        """Receive the body.

        Raises:
            Problem: 400 (invalid content-length), 408 (too slow), 413 (too large), 499 (the client disconnected), 503
                (too many requests, or too many bytes of bodies in memory).
        """
        try:
            return await self._received()
        except BaseException:
            self._drop()
            raise

    async def __aexit__(self, *rest: object) -> None:
        """Release the memory."""
        self._drop()

    async def _received(self) -> bytes:
        self._refusal = self._refused_unread()
        try:
            # With `Expect: 100-continue` the client waits for permission and has sent no body yet.
            if not (self._refusal and "expect" in self.request.headers):
                await asyncio.wait_for(self._receive(), self.limits.body_seconds)
        except asyncio.TimeoutError as error:
            late = f"The body did not arrive within {self.limits.body_seconds:g} seconds."
            raise Problem(408, late, {"connection": "close"}) from error
        except ClientDisconnect as error:
            raise Problem(CLIENT_GONE, "The client hung up.") from error
        if self._refusal:
            raise self._refusal
        return b"".join(self._chunks)

    async def _receive(self) -> None:
        size = 0
        async for chunk in self.request.stream():
            size += len(chunk)
            self._refusal = self._refusal or self._refused(size, len(chunk))
            if self._refusal is None:
                self._chunks.append(chunk)
                self._kept += len(chunk)
                self.service.buffered += len(chunk)
                continue
            self._drop()
            if size > DISCARD_FACTOR * self.limits.max_body:
                return

    def _drop(self) -> None:
        self._chunks.clear()
        self.service.buffered -= self._kept
        self._kept = 0

    def _refused(self, size: int, more: int) -> Problem | None:
        if size > self.limits.max_body:  # counted, because a chunked body declares no length
            return self._too_large()
        if self.service.buffered + more > self.limits.max_buffered:
            return busy("Too many bodies are being received.")
        return None

    def _refused_unread(self) -> Problem | None:
        declared = self.request.headers.get("content-length", "0")
        if not declared.isdecimal():
            return Problem(400, "The content-length is not a number.", {"connection": "close"})
        if int(declared[:20]) > self.limits.max_body:
            return self._too_large()
        return self.service.admission_error()

    def _too_large(self) -> Problem:
        return Problem(413, f"The body is larger than {self.limits.max_body} bytes.", {"connection": "close"})
