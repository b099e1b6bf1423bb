"""From the body of a request to the pixels that evaluation would see. Limits are checked before pixels are decoded."""

import base64
import binascii
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from kd.deploy.serve.limits import Limits, Problem
from kd.deploy.shift import Measures, measure
from kd.files.pixels import MARGIN, Beyond, centre_crop, least_of_centre, load, open_image

FORMATS = ("JPEG", "PNG", "WEBP")
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


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """One decoded and cropped image, and a summary of it for the log."""

    pixels: np.ndarray  # uint8 [3, S, S]
    summary: str
    measures: Measures  # see `kd.deploy.shift.measure`


def prepare(
    data: bytes, size: int, crop: float, limits: Limits, margin: float = MARGIN, bits: int = 16
) -> DecodedImage:
    """Decode an image file and crop it to `size` pixels a side, `crop` of the shorter side."""
    return decode(open_all([data], limits)[0], size, crop, margin, bits)


def open_all(files: Sequence[bytes], limits: Limits) -> list[Image.Image]:
    """Read and check the headers of image files; no pixel is decoded yet. 413 also if all have too many together."""
    opened, pixels = [], 0
    for data in files:
        if not data:
            raise Problem(400, "The image is empty (0 bytes).")
        image = _open(data, limits)
        pixels += image.width * image.height
        if pixels > limits.max_pixels_in_request:
            allowed = f"Allowed are {limits.max_pixels_in_request / 1e6:g} million in a request."
            raise Problem(413, f"The images have more pixels than allowed together. {allowed}")
        opened.append(image)
    return opened


def decode(image: Image.Image, size: int, crop: float, margin: float = MARGIN, bits: int = 16) -> DecodedImage:
    """Decode an opened image, crop it in the same way as evaluation, and close it; 400 if it is damaged."""
    try:
        with image:
            summary = f"{image.width}x{image.height} {image.mode} {image.format}"
            rgb, _ = load(image, lambda width, height: least_of_centre(width, height, size, crop), margin, bits)
    except MemoryError:
        raise  # the image is not at fault
    except Exception as error:  # on damaged data Pillow raises errors of every type
        raise Problem(400, f"The image is damaged or cut short ({type(error).__name__}).") from error
    pixels = np.ascontiguousarray(np.asarray(centre_crop(rgb, size, crop)).transpose(2, 0, 1))
    return DecodedImage(pixels, summary, measure(pixels))


def warm_up(size: int, crop: float, limits: Limits) -> None:
    """Load the decoders. Pillow imports each of them with the first image of its format."""
    for kind in FORMATS:
        file = io.BytesIO()
        Image.new("RGB", (64, 48)).save(file, kind)
        prepare(file.getvalue(), size, crop, limits)


def _open(data: bytes, limits: Limits) -> Image.Image:
    try:
        return open_image(data, FORMATS, limits.image)
    except Beyond as error:
        status = 413 if error.limit == "pixels" else 422
        raise Problem(status, f"The image {error.wrong}. {error.allowed}.") from error
    except MemoryError:
        raise
    except Exception as error:  # as in `decode`; a damaged header is enough
        if data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")) or data[:4] + data[8:12] == b"RIFFWEBP":
            raise Problem(400, "The image is damaged in its first bytes.") from error
        raise Problem(415, f"This is not an image in one of the formats {', '.join(FORMATS)}.") from error
