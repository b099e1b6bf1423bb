"""Read and decode an image file of the training data to RGB."""

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


def read_retried(
    read_bytes: Callable[[], bytes],
    subject: str,
    config_path: str,
    remedy: str = REMEDY,
) -> bytes:
    """Read an image file, with retries if the storage fails."""
    allowed = (
        "Every listed file can be read; data.on_corrupt=skip is for damaged images only"
    )
    return read_with_retries(
        read_bytes, subject, config_path, allowed=allowed, remedy=remedy
    )


def read_image_file(path: str | bytes, subject: str, config_path: str) -> bytes:
    """Read an image file; `subject` is its name in errors."""

    def read_bytes() -> bytes:
        with open(path, "rb") as file:
            check_file_size(os.fstat(file.fileno()).st_size, subject, config_path)
            return file.read()

    return read_retried(read_bytes, subject, config_path)


def check_file_size(size: int, subject: str, config_path: str) -> None:
    if size > MAX_BYTES:
        wrong = f"it has {size} bytes, more than the limit of {MAX_BYTES}"
        raise corrupt_image(subject, config_path, wrong)


def decode_image(
    data: bytes,
    subject: str,
    config_path: str,
    least: Least | None = None,
    bits: int = 16,
) -> Decoded:
    """Decode an image file to upright RGB, 8 bits per channel, with its CRC-32."""
    # `kd.files.pixels` defines the conversion to RGB. Not handled: damage that leaves a
    # JPEG decodable. `subject`: the file's name in messages, "file 'apple/1.jpg'";
    # `least`, `bits`: see `kd.files.pixels.decode_rgb`.
    if not data:
        raise corrupt_image(subject, config_path, "it is empty (0 bytes)")
    try:
        # Pillow warns about broken EXIF and odd palettes of fine images. catch_warnings
        # changes a global and is not thread-safe: two threads here may leave the filter
        # in place, so it silences only Pillow, and no result depends on it.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\.")
            with pixels.open_training_image(data) as image:
                rgb, used_bits = pixels.decode_rgb(image, least, bits=bits)
                return Decoded(
                    rgb, zlib.crc32(data), used_bits, image.format or "", len(data)
                )
    except UnidentifiedImageError as error:
        image_format = pixels.format_of(data)
        wrong = f"it is not an image (it begins with {data[:16]!r})"
        if data[4:8] == b"ftyp":
            ending = ".avif" if image_format == "AVIF" else ".heic"
            wrong = f"its content is {ending} ({READ_BY[ending]}), or damaged"
        elif image_format:
            wrong = "the image is truncated or damaged in its first bytes"
        raise corrupt_image(subject, config_path, wrong) from error
    except pixels.Beyond as error:
        wrong = f"the image is beyond a limit: it {error}"
        raise corrupt_image(subject, config_path, wrong) from error
    except MemoryError:
        raise  # an error of the machine, not of the image
    # Pillow's parsers raise errors of any type on damaged data.
    except Exception as error:
        detail = first_sentence(error)
        truncated = "truncated" in detail.lower() or isinstance(error, EOFError)
        verb = "is truncated" if truncated else "cannot be decoded"
        wrong = f"the image {verb} ({detail})"
        raise corrupt_image(subject, config_path, wrong) from error


def corrupt_image(subject: str, config_path: str, wrong: str) -> CorruptImage:
    allowed = (
        f"Allowed: whole images in {', '.join(FORMATS[:-1])} or {FORMATS[-1]} format"
    )
    return CorruptImage(
        config_path,
        f"{subject}: {wrong}",
        allowed,
        "Replace or delete it, or set data.on_corrupt=skip",
    )
