"""Decode an image file to evaluation's pixels, if its header is within the limits."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from kd.deploy.serve.limits import LOCAL, MIB, Limits, Problem
from kd.deploy.shift import Measures, measure
from kd.files import pixels
from kd.files.pixels import (
    HEIF,
    MARGIN,
    Beyond,
    count_scans,
    decode_rgb,
    least_of_centre,
    planes,
    reduce,
)

if TYPE_CHECKING:
    from kd.core.types import Decoded  # it imports torch

FORMATS = ("JPEG", "PNG", "WEBP")
NAMES = (*FORMATS, *(["HEIC"] if HEIF else []))
COEFFICIENT = 1 / 8
"""A progressive JPEG keeps its coefficients (2 bytes per pixel and channel) in memory
at full size, even if it is decoded at reduced size: an eighth of the 16 bytes budgeted
per pixel.
"""


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """A decoded and cropped image, and its summary for the log."""

    pixels: np.ndarray  # uint8 [3, S, S]
    summary: str
    measures: Measures  # see `kd.deploy.shift.measure`


@dataclass(frozen=True, slots=True)
class OpenedImage:
    """An image within the limits, not decoded yet."""

    image: Image.Image  # whether a JPEG will be decoded at reduced size
    summary: str
    share: float  # of the pixels that its format allows


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a regular file; raise OSError, or a Problem for others."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
        detail = "This is a folder, a pipe, a socket or a device, not a regular file."
        raise Problem(415, detail)
    check_bytes(status.st_size)
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def check_bytes(size: int) -> None:
    """Refuse a file larger than any allowed image needs."""
    if size > pixels.MAX_BYTES:
        detail = f"The image has {size} bytes. Allowed are {pixels.MAX_BYTES}."
        raise Problem(413, detail)


def prepare(
    data: bytes,
    size: int,
    crop: float,
    limits: Limits = LOCAL,
    margin: float = MARGIN,
    bits: int = 16,
) -> DecodedImage:
    """Decode an image file and crop a share of its shorter side to `size` pixels."""
    opened = open_image(data, size, crop, limits, margin)
    cropped = planes(decode(opened, bits), size, crop)
    return DecodedImage(cropped, opened.summary, measure(cropped))


def open_image(
    data: bytes, size: int, crop: float, limits: Limits, margin: float = MARGIN
) -> OpenedImage:
    """Open an image file, check its header, and choose the fraction to decode it at."""
    if not data:
        raise Problem(400, "The image is empty (0 bytes).")
    image = _open(data, limits)
    full_pixels = image.width * image.height
    sides = f"{image.width} x {image.height}"
    summary = f"{image.width}x{image.height} {image.mode} {image.format}"
    reduce(
        image, lambda width, height: least_of_centre(width, height, size, crop), margin
    )
    pixels_in_memory = image.width * image.height
    coefficients = full_pixels * len(image.getbands()) * COEFFICIENT
    if (
        image.format == "JPEG"
        and pixels_in_memory + coefficients > limits.max_pixels
        and count_scans(data) > 1
    ):
        pixels_in_memory += coefficients
    if pixels_in_memory > limits.max_pixels:
        detail = (
            f"The image has {sides} = {full_pixels / 1e6:.6g} million pixels; decoding"
            f" it needs the memory of {pixels_in_memory / 1e6:.1f}. At most"
            f" {limits.max_pixels / 1e6:g} million."
        )
        raise Problem(413, detail)
    return OpenedImage(image, summary, full_pixels / limits.of(image.format).pixels)


def check_together(images: Sequence[OpenedImage], limits: Limits) -> None:
    """Raise a Problem 413 if a request's images have too many pixels together."""
    if sum(image.share for image in images) > limits.full_images:
        detail = (
            f"The images have more pixels together than {limits.full_images} of the"
            f" largest that are allowed: {limits.max_pixels / 1e6:g} million, a JPEG"
            f" {limits.max_jpeg / 1e6:g}."
        )
        raise Problem(413, detail)


def decode(opened: OpenedImage, bits: int = 16) -> Image.Image:
    """Decode an opened image to upright RGB and close it; Problem 400 if damaged."""
    try:
        with opened.image as image:
            rgb, _ = decode_rgb(image, None, bits=bits)
    except Beyond as error:
        raise Problem(422, f"The image {error.wrong}. {error.allowed}.") from error
    except MemoryError:
        raise  # the image is not at fault
    except Exception as error:  # Pillow raises errors of any type on damaged data
        detail = f"The image is damaged or cut short ({type(error).__name__})."
        raise Problem(400, detail) from error
    return rgb


def refusal(image: "Decoded", limits: Limits) -> str:
    """Return in brief why the endpoint refuses an image of training's; "" if not."""
    kind = image.format
    bounds = limits.of(kind)
    shorter, longer = sorted(image.image.size)
    if image.file_bytes > limits.max_body:
        return f"above {limits.max_body / MIB:g} MiB"
    if kind and kind not in (*FORMATS, *["HEIF"] * HEIF):
        return kind
    if shorter < bounds.min_side:
        return f"with a side below {bounds.min_side} px"
    if longer > bounds.aspect * shorter:
        return f"with a side ratio above {bounds.aspect:g}"
    if shorter * longer > bounds.pixels:
        return f"{kind} above {bounds.pixels / 1e6:g} million pixels"
    return ""


def begins_as_image(data: bytes) -> bool:
    """Return whether bytes begin like an image file that an endpoint may read."""
    return pixels.format_of(data) in (*FORMATS, "HEIC", "AVIF")


def _open(data: bytes, limits: Limits) -> Image.Image:
    kind = pixels.format_of(data)
    try:
        formats = ("HEIF",) if kind == "HEIC" and pixels.load_heif() else FORMATS
        bounds = limits.of("JPEG" if data[:2] == b"\xff\xd8" else "")
        return pixels.open_image(data, formats, bounds)
    except Beyond as error:
        status = 413 if error.limit == "pixels" else 422
        raise Problem(status, f"The image {error.wrong}. {error.allowed}.") from error
    except MemoryError:
        raise
    except Exception as error:  # as in `decode`; a damaged header is enough
        names = ", ".join(NAMES)
        if kind in ("HEIC", "AVIF") and kind not in NAMES:
            remedy = "Send a JPEG"
            if kind == "HEIC":
                remedy += ", or on the server: pip install 'PATH/kd[heic]'"
            detail = f"This is {kind}. Allowed are the formats {names}. {remedy}."
            raise Problem(415, detail) from error
        if begins_as_image(data):
            raise Problem(400, "The image is damaged in its first bytes.") from error
        detail = f"This is not an image in one of the formats {names}."
        raise Problem(415, detail) from error
