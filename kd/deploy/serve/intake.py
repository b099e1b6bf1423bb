"""Receive the body of a request within limits of size, time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from kd.deploy.serve.problems import CLIENT_GONE, Problem, busy
from kd.deploy.serve.service import Service

DISCARD_FACTOR = 4
"""A body that is too large is read and discarded up to this many times `max_body`. Then the connection is closed."""


@asynccontextmanager
async def request_body(request: Request, service: Service) -> AsyncIterator[bytes]:
    """Yield the body of a request. It is counted in `service.buffered` until the `async with` block ends.

    The body of a rejected request is also read to its end, and discarded. A client that is still writing when the
    connection closes gets a broken pipe and never reads the answer. A Problem is 400 (invalid content-length), 408 (too
    slow), 413 (too large), 499 (the client disconnected) or 503 (too many requests, or bytes of bodies in memory).
    """
    body = bytearray()
    try:
        yield await _receive(request, service, body)
    finally:
        service.buffered -= len(body)


async def _receive(request: Request, service: Service, body: bytearray) -> bytes:
    seconds = service.limits.body_seconds
    refusal = _refuse_by_headers(request, service)
    try:
        # With `Expect: 100-continue` the client waits for permission and has sent no body yet.
        if not (refusal and "expect" in request.headers):
            refusal = await asyncio.wait_for(_read(request, service, body, refusal), seconds)
    except asyncio.TimeoutError as error:
        late = f"The body did not arrive within {seconds:g} seconds."
        raise Problem(408, late, {"connection": "close"}) from error
    except ClientDisconnect as error:
        raise Problem(CLIENT_GONE, "The client hung up.") from error
    if refusal:
        raise refusal
    return bytes(body)


async def _read(request: Request, service: Service, body: bytearray, refusal: Problem | None) -> Problem | None:
    """Read the stream into `body`, or discard it once it is refused; return the refusal."""
    limits, size = service.limits, 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limits.max_body:  # counted, because a chunked body declares no length
            refusal = refusal or _too_large(limits.max_body)
        elif service.buffered + len(chunk) > limits.max_buffered:
            refusal = refusal or busy("Too many bodies are being received.")
        if refusal is None:
            body += chunk
            service.buffered += len(chunk)
            continue
        service.buffered -= len(body)
        body.clear()
        if size > DISCARD_FACTOR * limits.max_body:
            break
    return refusal


def _refuse_by_headers(request: Request, service: Service) -> Problem | None:
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal():
        return Problem(400, "The content-length is not a number.", {"connection": "close"})
    if int(declared[:20]) > service.limits.max_body:
        return _too_large(service.limits.max_body)
    return service.admission_error()


def _too_large(max_body: int) -> Problem:
    return Problem(413, f"The body is larger than {max_body} bytes.", {"connection": "close"})
