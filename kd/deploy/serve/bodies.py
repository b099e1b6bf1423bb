"""Extract the image files of a request body: raw, JSON or multipart."""

from __future__ import annotations

import base64
import binascii
import json
import re

from kd.deploy.serve.limits import Problem

RAW = ("image/jpeg", "image/png", "image/webp", "application/x-image")
JSON, MULTIPART = "application/json", "multipart/form-data"
ALLOWED = (*RAW, JSON, MULTIPART)
MAX_PART_HEADER = 8192  # bytes: chosen: half of what all headers of a request may have
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
    """Return the image files in a body of the type `kind`; `header` may have a multipart boundary."""
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
