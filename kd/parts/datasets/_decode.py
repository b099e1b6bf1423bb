"""Read and decode an image file of the training data to RGB; what cannot be read is an
error in one line.
"""

import os
import warnings
import zlib
from collections.abc import Callable

from PIL import UnidentifiedImageError

from kd.core.errors import CorruptImage, first_sentence
from kd.core.types import Decoded
from kd.files import pixels
from kd.files.folders import READ_BY
from kd.files.pixels import FORMATS, MAX_BYTES, Least
from kd.files.storage import REMEDY, read_with_retries


def read(
    content: Callable[[], bytes], subject: str, config_path: str, remedy: str = REMEDY
) -> bytes:
    """Read an image file, with retries if the storage fails."""
    allowed = (
        "Every listed file can be read; data.on_corrupt=skip is for damaged images only"
    )
    return read_with_retries(
        content, subject, config_path, allowed=allowed, remedy=remedy
    )


def read_file(path: str | bytes, subject: str, config_path: str) -> bytes:
    """Read an image file; `subject` is its name in errors."""

    def content() -> bytes:
        with open(path, "rb") as file:
            check_bytes(os.fstat(file.fileno()).st_size, subject, config_path)
            return file.read()

    return read(content, subject, config_path)


def check_bytes(size: int, subject: str, config_path: str) -> None:
    if size > MAX_BYTES:
        raise refuse(
            subject,
            config_path,
            f"it has {size} bytes, more than the limit of {MAX_BYTES}",
        )


def decode(
    data: bytes,
    subject: str,
    config_path: str,
    least: Least | None = None,
    bits: int = 16,
) -> Decoded:
    """Decode an image file to upright RGB, 8 bits per channel; also return the CRC-32
    of its bytes.
    """
    # `kd.files.pixels` defines the conversion to RGB. Not handled: damage that leaves a
    # JPEG decodable. `subject`: the file's name in messages, "file 'apple/1.jpg'";
    # `least`, `bits`: see `kd.files.pixels.decode_rgb`.
    if not data:
        raise refuse(subject, config_path, "it is empty (0 bytes)")
    try:
        # Pillow warns about broken EXIF and odd palettes of fine images. catch_warnings
        # changes a global and is not thread-safe: two threads here may leave the filter
        # in place, so it silences only Pillow, and no result depends on it.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\.")
            with pixels.open_training_image(data) as image:
                rgb, used = pixels.decode_rgb(image, least, bits=bits)
                return Decoded(
                    rgb, zlib.crc32(data), used, image.format or "", len(data)
                )
    except UnidentifiedImageError as error:
        kind = pixels.format_of(data)
        if data[4:8] == b"ftyp":
            ending = ".avif" if kind == "AVIF" else ".heic"
            raise refuse(
                subject,
                config_path,
                f"its content is {ending} ({READ_BY[ending]}), or damaged",
            ) from error
        if kind:
            raise refuse(
                subject,
                config_path,
                "the image is truncated or damaged in its first bytes",
            ) from error
        raise refuse(
            subject, config_path, f"it is not an image (it begins with {data[:16]!r})"
        ) from error
    except pixels.Beyond as error:
        raise refuse(
            subject, config_path, f"the image is beyond a limit: it {error}"
        ) from error
    except MemoryError:
        raise  # an error of the machine, not of the image
    except (
        Exception
    ) as error:  # Pillow's parsers raise errors of any type on damaged data
        detail = first_sentence(error)
        verb = (
            "is truncated"
            if "truncated" in detail.lower() or isinstance(error, EOFError)
            else "cannot be decoded"
        )
        raise refuse(subject, config_path, f"the image {verb} ({detail})") from error


def refuse(subject: str, config_path: str, wrong: str) -> CorruptImage:
    allowed = (
        f"Allowed: whole images in {', '.join(FORMATS[:-1])} or {FORMATS[-1]} format"
    )
    return CorruptImage(
        config_path,
        f"{subject}: {wrong}",
        allowed,
        "Replace or delete it, or set data.on_corrupt=skip",
    )
