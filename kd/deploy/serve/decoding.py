"""Decode an image file to evaluation's pixels. Limits are checked before pixels are
decoded.
"""

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
    share: float  # share of the pixels that its format allows


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of an image file; OSError, or a Problem if it is not a regular
    file.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
        raise Problem(
            415, "This is a folder, a pipe, a socket or a device, not a regular file."
        )
    check_bytes(status.st_size)
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def check_bytes(size: int) -> None:
    """Refuse a file larger than any allowed image needs."""
    if size > pixels.MAX_BYTES:
        raise Problem(
            413, f"The image has {size} bytes. Allowed are {pixels.MAX_BYTES}."
        )


def prepare(
    data: bytes,
    size: int,
    crop: float,
    limits: Limits = LOCAL,
    margin: float = MARGIN,
    bits: int = 16,
) -> DecodedImage:
    """Decode an image file and crop the share `crop` of the shorter side to `size`
    pixels.
    """
    opened = open_image(data, size, crop, limits, margin)
    cropped = planes(decode(opened, bits), size, crop)
    return DecodedImage(cropped, opened.summary, measure(cropped))


def open_image(
    data: bytes, size: int, crop: float, limits: Limits, margin: float = MARGIN
) -> OpenedImage:
    """Open an image file, check its header, and choose the fraction at which it is
    decoded.
    """
    if not data:
        raise Problem(400, "The image is empty (0 bytes).")
    image = _open(data, limits)
    whole, sides = image.width * image.height, f"{image.width} x {image.height}"
    summary = f"{image.width}x{image.height} {image.mode} {image.format}"
    reduce(
        image, lambda width, height: least_of_centre(width, height, size, crop), margin
    )
    held, coefficients = (
        image.width * image.height,
        whole * len(image.getbands()) * COEFFICIENT,
    )
    several = (
        image.format == "JPEG"
        and held + coefficients > limits.max_pixels
        and count_scans(data) > 1
    )
    if held + several * coefficients > limits.max_pixels:
        wrong = (
            f"The image has {sides} = {whole / 1e6:.6g} million pixels; decoding it"
            " needs the memory of"
        )
        taken = (
            f"{(held + several * coefficients) / 1e6:.1f}. At most"
            f" {limits.max_pixels / 1e6:g} million"
        )
        raise Problem(413, f"{wrong} {taken}.")
    return OpenedImage(image, summary, whole / limits.of(image.format).pixels)


def check_together(images: Sequence[OpenedImage], limits: Limits) -> None:
    """Limit the total pixels of a request's images: a Problem 413."""
    if sum(image.share for image in images) > limits.full_images:
        detail = (
            f"The images have more pixels together than {limits.full_images} of the"
            " largest that are allowed"
        )
        raise Problem(
            413,
            f"{detail}: {limits.max_pixels / 1e6:g} million, a JPEG"
            f" {limits.max_jpeg / 1e6:g}.",
        )


def decode(opened: OpenedImage, bits: int = 16) -> Image.Image:
    """Decode an opened image to upright RGB and close it; Problem 400 if it is
    damaged.
    """
    try:
        with opened.image as image:
            rgb, _ = decode_rgb(image, None, bits=bits)
    except Beyond as error:
        raise Problem(422, f"The image {error.wrong}. {error.allowed}.") from error
    except MemoryError:
        raise  # the image is not at fault
    except Exception as error:  # Pillow raises errors of any type on damaged data
        raise Problem(
            400, f"The image is damaged or cut short ({type(error).__name__})."
        ) from error
    return rgb


def refusal(image: "Decoded", limits: Limits) -> str:
    """Return in brief why the endpoint refuses an image that training accepts; "" if it
    does not.
    """
    kind = image.format
    (less, more), most = sorted(image.image.size), limits.of(kind)
    if image.file_bytes > limits.max_body:
        return f"above {limits.max_body / MIB:g} MiB"
    if kind and kind not in (*FORMATS, *["HEIF"] * HEIF):
        return kind
    if less < most.min_side:
        return f"with a side below {most.min_side} px"
    if more > most.aspect * less:
        return f"with a side ratio above {most.aspect:g}"
    return (
        f"{kind} above {most.pixels / 1e6:g} million pixels"
        if less * more > most.pixels
        else ""
    )


def begins_as_image(data: bytes) -> bool:
    """Return whether bytes begin like an image file that an endpoint may read."""
    return pixels.format_of(data) in (*FORMATS, "HEIC", "AVIF")


def _open(data: bytes, limits: Limits) -> Image.Image:
    kind = pixels.format_of(data)
    try:
        formats = ("HEIF",) if kind == "HEIC" and pixels.load_heif() else FORMATS
        return pixels.open_image(
            data, formats, limits.of("JPEG" if data[:2] == b"\xff\xd8" else "")
        )
    except Beyond as error:
        status = 413 if error.limit == "pixels" else 422
        raise Problem(status, f"The image {error.wrong}. {error.allowed}.") from error
    except MemoryError:
        raise
    except Exception as error:  # as in `decode`; a damaged header is enough
        if kind in ("HEIC", "AVIF") and kind not in NAMES:
            remedy = "Send a JPEG, or on the server: pip install 'PATH/kd[heic]'" * (
                kind == "HEIC"
            )
            detail = (
                f"This is {kind}. Allowed are the formats {', '.join(NAMES)}."
                f" {remedy or 'Send a JPEG'}."
            )
            raise Problem(415, detail) from error
        if begins_as_image(data):
            raise Problem(400, "The image is damaged in its first bytes.") from error
        raise Problem(
            415, f"This is not an image in one of the formats {', '.join(NAMES)}."
        ) from error
