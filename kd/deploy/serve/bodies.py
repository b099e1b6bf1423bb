"""Extract the image files from the body of a request."""

import base64
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from email.message import Message
from typing import Any

from python_multipart import FormParser
from python_multipart.exceptions import FormParserError

from kd.deploy.serve.decoding import begins_as_image
from kd.deploy.serve.limits import Problem
from kd.deploy.serve.responses import JSON
from kd.files.pixels import HEIF

RAW = (
    "image/jpeg", "image/png", "image/webp", "application/x-image",
    "application/octet-stream", *(["image/heic"] if HEIF else []),
)  # fmt: skip
MULTIPART = "multipart/form-data"
ALLOWED = (*RAW, JSON, MULTIPART)
ALIASES = {
    "image/jpg": "image/jpeg",
    "image/pjpeg": "image/jpeg",
    "image/x-png": "image/png",
    "image/x-image": "application/x-image",
    "image/heic": "application/x-image",
    "image/heif": "application/x-image",
    "image/avif": "application/x-image",
}
URL_SAFE = bytes.maketrans(b"-_", b"+/")
ALPHABET = re.compile(rb"[A-Za-z0-9+/]*")
MAX_FIELDS = 64  # text fields of a form; chosen: more than forms have
MAX_NAME = 60  # bytes of a name in a message; chosen: more than forms have
# content types of a field that is a file without a filename (RFC 7578 4.2 requires one)
FILE_TYPE = re.compile("image/|application/octet-stream", re.IGNORECASE)
SPARE_VALUES = 1000
"""Most values in a JSON body beside its images, counted before parsing: a list of empty
lists takes 25 bytes of memory per byte of text.
"""
TOP = 5  # default number of classes in a response, as in "top-5" accuracy
SHAPE = 'The JSON body must be {"image": BASE64} or {"images": [BASE64, ...]}'


@dataclass(frozen=True, slots=True)
class Sent:
    """Content of a body."""

    files: list[bytes]
    # the client's names of the files; empty: not given
    names: list[str] = field(default_factory=list)
    top: str = ""  # the field of a form or of JSON

    @contextmanager
    def of(self, i: int) -> Iterator[None]:
        """Name the image of a Problem, if there are several."""
        try:
            yield
        except Problem as problem:
            detail = problem.detail
            places = [f"'{self.names[i]}'"] if self.names else []
            if len(self.files) > 1:
                number = f"image {i + 1} of {len(self.files)}"
                detail = f"{number}: {detail}"
                places.append(number)
            client_detail = f"{', '.join(places)}: {problem.detail}" if places else ""
            raise Problem(
                problem.status, detail, problem.headers, client_detail
            ) from problem


def media_type(header: str) -> str:
    """Return a content-type header's media type; raise a Problem 415 for unknown types.

    Without a header, as from AWS's clients, the content decides (RFC 9110 8.3).
    """
    kind = header.partition(";")[0].strip().lower() or "application/octet-stream"
    kind = ALIASES.get(kind, kind)
    if kind not in ALLOWED:
        wrong = f"This content-type is not supported. Allowed are {', '.join(ALLOWED)}."
        raise Problem(415, wrong, {"accept": ", ".join(ALLOWED)})
    return kind


def parse_top(values: Sequence[str]) -> int:
    """Return the number of classes in a response, given `top` from query and body."""
    texts = {*values} or {str(TOP)}
    top = texts.pop()
    if texts or not re.fullmatch(r"[0-9]{1,6}", top) or int(top) < 1:
        detail = "The parameter `top` must be a whole number from 1, given once."
        raise Problem(400, detail)
    return int(top)


def is_gzip(header: str) -> bool:
    """Return whether content is gzipped; raise a Problem 415 for another coding."""
    codings = [coding.strip().lower() for coding in header.split(",")]
    codings = [coding for coding in codings if coding not in ("", "identity")]
    if codings and codings not in (["gzip"], ["x-gzip"]):
        detail = "This content coding is not supported. Allowed is gzip."
        raise Problem(415, detail, {"accept-encoding": "gzip, identity"})
    return bool(codings)


def decompress(body: bytes, max_bytes: int) -> bytes:
    """Return the content of a gzip body, at most `max_bytes`.

    Not handled: several members, which take n^2 time.
    """
    member = zlib.decompressobj(wbits=31)
    try:
        content = member.decompress(body, max_bytes + 1)
    except zlib.error as error:
        detail = "The body is not gzip, as its content-encoding says, or damaged."
        raise Problem(400, detail) from error
    if len(content) > max_bytes:
        raise Problem(413, f"The body is larger than {max_bytes} bytes.")
    if not member.eof or member.unused_data:
        raise Problem(400, "The gzip body is cut short, or has more than one member.")
    return content


def images(kind: str, header: str, body: bytes, max_images: int) -> Sent:
    """Return the image files in a body of the media type `kind`.

    `header` is the content-type, which may have a multipart boundary.
    """
    if kind == JSON:
        sent = _from_json(body, max_images)
    elif kind == MULTIPART:
        sent = _from_multipart(header, body, max_images)
    else:
        sent = Sent([body])
    if not sent.files:
        raise Problem(400, "There is no image in the request.")
    if len(sent.files) > max_images:
        raise _too_many(max_images)
    return sent


def _from_json(body: bytes, max_images: int) -> Sent:
    if sum(map(body.count, (b",", b"[", b"{"))) > max_images + SPARE_VALUES:
        raise Problem(413, "The JSON body holds more values than a request needs.")
    try:
        content = json.loads(body, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        wrong = f"The body is not JSON ({type(error).__name__})."
        raise Problem(400, f"{wrong} JSON lines are not supported.") from error
    if not isinstance(content, dict) or not {"image", "images"} & content.keys():
        raise Problem(400, f"{SHAPE}.")
    if {"image", "images"} <= content.keys():
        raise Problem(400, f"{SHAPE}; it has both.")
    encoded_images = content.get("images", [content.get("image")])
    if not isinstance(encoded_images, list):
        raise Problem(400, f"{SHAPE}; `images` is no list.")
    top = content.get("top")
    sent = Sent([b""] * len(encoded_images), top="" if top is None else str(top))
    for i, encoded in enumerate(encoded_images):
        with sent.of(i):
            sent.files[i] = _from_base64(encoded)
    return sent


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise Problem(400, "The JSON body has a key twice.")
    return content


def _from_base64(encoded: Any) -> bytes:
    """Decode base64 in either alphabet, bare or as a `data:` URL (RFC 2397).

    It may have line breaks.
    """
    if not isinstance(encoded, str):
        raise Problem(400, f"{SHAPE}; another type was found.")
    if encoded[:5].lower() == "data:":
        head, _, encoded = encoded.partition(",")
        if not head.lower().endswith(";base64"):
            raise Problem(400, "A `data:` URL must have `;base64,` before its data.")
    try:
        data = encoded.encode("ascii").translate(URL_SAFE, b" \t\r\n")
        if len(data) % 4 and ALPHABET.fullmatch(data):
            detail = "The base64 is cut short, or has no padding (`=` at its end)."
            raise Problem(400, detail)
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        detail = f"{SHAPE}; an image is not base64 (addresses are not fetched)."
        raise Problem(400, detail) from error


class _Form:
    """Collects a form's files, which are images, and its text fields."""

    def __init__(self, max_images: int) -> None:
        self._max_images = max_images
        self.sent = Sent([])
        self.texts: dict[str, bytes] = {}
        self.ended = False

    def on_file(self, file: Any) -> None:
        file.file_object.seek(0)
        content = file.file_object.read()
        if content or file.file_name:  # else a file input that was left empty
            self._add_image(file.file_name or file.field_name, content)

    def on_field(self, field: Any) -> None:
        content = field.value or b""
        is_file = FILE_TYPE.match(field.content_type or "") or begins_as_image(content)
        if content and is_file:
            self._add_image(field.field_name, content)
        elif content:
            self.texts[_name(field.field_name)] = content
        if len(self.texts) > MAX_FIELDS:
            detail = f"There are more than {MAX_FIELDS} text fields in the request."
            raise Problem(413, detail)

    def on_end(self) -> None:
        self.ended = True

    def _add_image(self, name: bytes | None, content: bytes) -> None:
        if len(self.sent.files) == self._max_images:
            raise _too_many(self._max_images)
        self.sent.files.append(content)
        self.sent.names.append(_name(name))


def _from_multipart(header: str, body: bytes, max_images: int) -> Sent:
    content_type = Message()
    content_type["content-type"] = header
    boundary = content_type.get_boundary()
    if not boundary:
        raise Problem(400, "The content-type has no valid boundary.")
    form = _Form(max_images)
    # No temporary files: a container may have no disk to write.
    config = {"MAX_MEMORY_FILE_SIZE": len(body) + 1}
    try:
        parser = FormParser(
            MULTIPART,
            form.on_field,
            form.on_file,
            form.on_end,
            boundary=boundary.encode(),
            config=config,
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:  # its text may be the client's
        detail = "has another boundary, or a part without a name (RFC 7578)"
        raise Problem(400, f"The multipart body {detail}.") from error
    if not form.ended:
        detail = "is cut short: it does not end with its boundary and `--`"
        raise Problem(400, f"The multipart body {detail}.")
    if not form.sent.files and form.texts:
        detail = "There is no image in the request. Text fields are not images"
        names = ", ".join(map(repr, form.texts))
        raise Problem(400, f"{detail}.", client_detail=f"{detail}: {names}.")
    return replace(form.sent, top=_name(form.texts.get("top")).strip())


def _name(content: bytes | None) -> str:
    return (content or b"")[:MAX_NAME].decode(errors="replace")


def _too_many(max_images: int) -> Problem:
    return Problem(413, f"There are more than {max_images} images in the request.")
