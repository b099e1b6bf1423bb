"""Read the body of a request within limits, and extract its image files: raw, JSON or multipart."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request

from kd.serve.problems import CLIENT_GONE, Problem, busy

if TYPE_CHECKING:  # the service reads bodies
    from kd.serve.service import Service

RAW = ("image/jpeg", "image/png", "image/webp", "application/x-image")
JSON, MULTIPART = "application/json", "multipart/form-data"
ALLOWED = (*RAW, JSON, MULTIPART)
MAX_PART_HEADER = 8192
SPARE_VALUES = 1000
"""Values that a JSON body may hold beside its images. They are counted before parsing, because a list of empty lists
takes 25 bytes of memory for each byte of text."""
SHAPE = 'The JSON body must be {"image": BASE64} or {"images": [BASE64, ...]}'


def media_type(header: str) -> str:
    """Return the media type of a content-type header, normalized; a Problem 415 if it is missing or not supported."""
    kind = header.partition(";")[0].strip().lower()
    kind = {"image/jpg": "image/jpeg", "image/x-image": "application/x-image"}.get(kind, kind)
    if kind not in ALLOWED:
        wrong = "There is no content-type." if not kind else "This content-type is not supported."
        raise Problem(415, f"{wrong} Allowed are {', '.join(ALLOWED)}.", {"accept": ", ".join(ALLOWED)})
    return kind


def images(kind: str, header: str, body: bytes, max_images: int) -> list[bytes]:
    """Return the image files in a body. `kind` is the result of `media_type`; `header` may have a multipart boundary.

    A Problem is 400 (the body does not match its type) or 413 (too many images or values).
    """
    files = [body]
    if kind == JSON:
        files = _from_json(body, max_images)
    elif kind == MULTIPART:
        files = _from_multipart(header, body, max_images)
    if not files:
        raise Problem(400, "There is no image in the request.")
    if len(files) > max_images:
        raise Problem(413, f"There are more than {max_images} images in the request.")
    return files


def _from_json(body: bytes, max_images: int) -> list[bytes]:
    if sum(map(body.count, (b",", b"[", b"{"))) > max_images + SPARE_VALUES:
        raise Problem(413, "The JSON body holds more values than a request needs.")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"The body is not JSON ({type(error).__name__}).") from error
    if not isinstance(content, dict) or not {"image", "images"} & content.keys():
        raise Problem(400, f"{SHAPE}.")
    texts = content["images"] if "images" in content else [content["image"]]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise Problem(400, f"{SHAPE}; what is not a string was found.")
    try:
        return [base64.b64decode(text, validate=True) for text in texts]
    except (binascii.Error, ValueError) as error:
        raise Problem(400, f"{SHAPE}; an image is not base64 (addresses are not fetched).") from error


def _from_multipart(header: str, body: bytes, max_images: int) -> list[bytes]:
    """Split a whole multipart body. Every part counts as an image, whatever its name is."""
    boundary = re.search(r'boundary="?([0-9A-Za-z\'()+_,./:=? -]{1,70})"?', header)
    if boundary is None:
        raise Problem(400, "The content-type has no valid boundary.")
    delimiter = b"\r\n--" + boundary[1].strip().encode("ascii")
    pieces = (b"\r\n" + body).split(delimiter, max_images + 2)
    if len(pieces) < 2 or (not pieces[-1].startswith(b"--") and len(pieces) <= max_images + 2):
        raise Problem(400, "The multipart body does not end with its boundary.")
    parts = []
    for piece in pieces[1:]:
        if piece.startswith(b"--"):
            break
        head, separator, content = piece.partition(b"\r\n\r\n")
        if not separator or len(head) > MAX_PART_HEADER:
            raise Problem(400, "A part of the multipart body has no end of its header.")
        parts.append(content)
    return parts


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
