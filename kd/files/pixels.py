"""Open image files within limits, decode them, and crop for evaluation.

Training, prediction and the endpoint use these functions, so that a file gives the same
pixels everywhere, and the same limits hold for it. This module imports only Pillow and
NumPy, because the endpoint runs without torch.
"""

import io
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import product

import numpy as np
from PIL import Image, ImageFile, ImageOps, JpegImagePlugin, UnidentifiedImageError

ENDINGS = (
    "jpg",
    "jpeg",
    "png",
    "webp",
    "bmp",
    "gif",
    "tif",
    "tiff",
    # names that browsers and programs use for JPEG, PNG and BMP
    "jfif",
    "jpe",
    "jif",
    "pjpeg",
    "pjp",
    "jpeg_large",
    "jpg_large",
    "apng",
    "dib",
)
"""Endings of image files. A sample of a tar shard with several gives the first."""
HEIF = find_spec("pillow_heif") is not None
AVIF = find_spec("PIL._avif") is not None
FORMATS = (
    "JPEG",
    "PNG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    *["AVIF"] * AVIF,
    *["HEIF"] * HEIF,
)
"""Formats of training and validation images, recognized by content, not by file name.
Pillow has more, some of which start other programs (EPS). The endpoint reads fewer.
"""
SIGNS = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG": "PNG",
    b"GIF8": "GIF",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"BM": "BMP",
}
"""First bytes of formats."""
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
# bytes of an image file. Within the limit on pixels no file needs more; larger files
# are not read.
MAX_BYTES = 2**30
MAX_PIXELS = 89_478_485  # pixels of a training image: Pillow's own limit
MAX_SCANS = 64
"""Most scans of a progressive JPEG. Each is a pass over all pixels; encoders write ten,
crafted files thousands.
"""
MARGIN = 1.5
"""A JPEG is decoded at 1/2, 1/4 or 1/8 of its sides if it then still has this many
times the needed pixels.

Part of the identity of caches, stores and exports, because it affects pixels.
"""
Least = Callable[[int, int], float]
"""(width, height) -> the share of its sides that an image must keep; above 1: the image
is too small.
"""


@dataclass(frozen=True, slots=True)
class Most:
    """An image must keep these limits, which are read from its header."""

    pixels: int = MAX_PIXELS
    scans: int = MAX_SCANS
    min_side: int = 1  # pixels
    aspect: float = math.inf  # longer side over shorter side


MOST = Most()  # limits of training


class Beyond(ValueError):
    """An image exceeds a limit: "pixels", "sides", "scans" or "bits".

    The text is `The image WRONG. ALLOWED`.
    """

    def __init__(self, limit: str, wrong: str, allowed: str) -> None:
        super().__init__(f"{wrong}; {allowed[0].lower()}{allowed[1:]}")
        self.limit = limit
        self.wrong = wrong
        self.allowed = allowed


def format_of(head: bytes) -> str:
    """Return the format of an image file by its first 12 bytes; "": it is no image.

    For example "JPEG" or "HEIC".
    """
    if head[:4] == b"RIFF":
        return "WEBP" if head[8:12] == b"WEBP" else ""
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        if brand in (b"avif", b"avis"):
            return "AVIF"
        return "HEIC" if brand in HEIF_BRANDS else ""
    return next((name for sign, name in SIGNS.items() if head.startswith(sign)), "")


def load_heif() -> bool:
    """Load the HEIC decoder, if installed, with the first such image.

    It takes 26 MB.
    """
    if HEIF and "HEIF" not in Image.OPEN:
        import_module("pillow_heif").register_heif_opener()
    return HEIF


def open_training_image(data: bytes) -> Image.Image:
    """Open an image file of any of `FORMATS`, with training's limits.

    See `open_image`.
    """
    heif = data[4:8] == b"ftyp" and format_of(data) != "AVIF" and load_heif()
    return open_image(data, [name for name in FORMATS if name != "HEIF" or heif], MOST)


def open_image(data: bytes, formats: Sequence[str], limits: Most) -> Image.Image:
    """Open an image file by its content; if it holds several images, the first.

    Raises:
        Beyond: it exceeds `limits`.
        UnidentifiedImageError: its format is not in `formats`, as Pillow names them.
    """
    # Image.open compares with Image.MAX_IMAGE_PIXELS, a global that kd must not change.
    # It also reports a phone's JPEG with a second image behind it as "MPO", to which
    # rules about "JPEG" would not apply.
    Image.preinit()
    for name in formats:
        if name not in Image.OPEN:
            Image.init()
        factory, accept = Image.OPEN[name]
        # text instead of an image: a decoder is not installed
        if accept and accept(data[:16]) is not True:
            continue
        if name == "JPEG":
            factory = JpegImagePlugin.JpegImageFile
        try:
            image = factory(io.BytesIO(data), "")
        # as Image.open: not of this format
        except (SyntaxError, IndexError, TypeError, struct.error):
            continue
        _require_within(image, data, limits)
        return image
    raise UnidentifiedImageError("cannot identify image file")


def _require_within(image: Image.Image, data: bytes, limits: Most) -> None:
    width, height = image.size
    sides = f"{width} x {height}"
    if width * height > limits.pixels:
        wrong = f"has {sides} = {width * height / 1e6:.6g} million pixels"
        raise Beyond("pixels", wrong, f"At most {limits.pixels / 1e6:g} million")
    if min(width, height) < limits.min_side:
        allowed = f"Each side must have {limits.min_side} or more"
        raise Beyond("sides", f"has {sides} pixels", allowed)
    if max(width, height) > limits.aspect * min(width, height):
        allowed = f"The longer side may be {limits.aspect:g} times the shorter one"
        raise Beyond("sides", f"has {sides} pixels", allowed)
    # counting the bytes is faster, and gives as many scans or more
    if image.format == "JPEG" and data.count(b"\xff\xda") > limits.scans:
        scans = count_scans(data)
        if scans > limits.scans:
            raise Beyond(
                "scans", f"is a JPEG of {scans} scans", f"At most {limits.scans}"
            )


# JPEG markers, except those inside a scan's data
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_END = 0xD9  # marker of an image's end
_SCAN = 0xDA  # marker of a scan's beginning
_BARE = (0x01, 0xD8)  # markers without a length


def count_scans(data: bytes) -> int:
    """Return the number of scans of the first image in a JPEG file.

    Its thumbnails and later images do not count.
    """
    position = 2
    scans = 0
    while match := _MARKER.search(data, position):
        position = match.end()
        marker = data[position - 1]
        if marker == _END:
            break
        scans += marker == _SCAN
        if marker not in _BARE:
            position += int.from_bytes(data[position : position + 2], "big")
    return scans


def reduce(image: Image.Image, least: Least | None, margin: float = MARGIN) -> None:
    """Set the decoder of an opened JPEG to a reduced size.

    Call it before pixels are loaded.
    """
    if least is not None and margin and could_reduce(image, least, margin):
        share = margin * least(*image.size)
        sides = math.ceil(share * image.width), math.ceil(share * image.height)
        image.draft(None, sides)


def could_reduce(image: Image.Image, least: Least, margin: float = MARGIN) -> bool:
    """Return whether an image at half its sides is large enough."""
    return margin * least(*image.size) <= 0.5


def least_of_centre(width: int, height: int, size: int, crop: float) -> float:
    """Return the share of the sides at which `centre_crop` still has `size` pixels."""
    return size / max(1.0, min(width, height) * crop)


def least_of_random(width: int, height: int, size: int, crop: float) -> float:
    """Return the share of the sides at which random crops have `size` pixels.

    `crop` 1.0: the crop is the whole image.

    A crop (`kd.data.views.random_box`) has at least the share `crop` of the area and,
    unless a side of the image stops it, a side ratio of at most 4 : 3. So its shorter
    side is no less than sqrt(3/4 crop W H), or than the shorter side of the image. Both
    stay at `size` or above at

        max(size / min(W, H), size / sqrt(3/4 crop W H))

    which leaves 4/3 size^2 / crop pixels of an image, whatever its shape.
    """
    factor = size / min(width, height)
    if crop >= 1.0:
        return factor
    return max(factor, size / math.sqrt(0.75 * crop * width * height))


def decode_rgb(
    image: Image.Image, least: Least | None, margin: float = MARGIN, bits: int = 16
) -> tuple[Image.Image, int]:
    """Decode an opened image to upright RGB, and return the bits of its largest value.

    For these bits see `Decoded.used_bits`.

    The range of an image of 16 bits per channel is its lower `bits`. Beyond: it has
    larger values, or it is in colour and `bits` is not 16, because Pillow keeps only
    the upper 8 bits of 16-bit colour.
    """
    wide = isinstance(image, ImageFile.ImageFile) and any(
        ";16" in str(tile[3]) for tile in image.tile
    )
    reduce(image, least, margin)
    image.load()
    grey = _is_wide_grey(image)
    used_bits = int(np.asarray(image).max()).bit_length() if grey else 0
    if used_bits > bits:
        wrong = f"has values of {used_bits} bits"
        raise Beyond("bits", wrong, f"At most {bits}, as data.bits says")
    rgb = to_rgb(image, bits)
    if wide and not grey:
        used_bits = -8 - max(high for _, high in rgb.getextrema()).bit_length()  # type: ignore[union-attr]
        if bits < 16:
            wrong = "has 16 bits a channel in colour"
            raise Beyond("bits", wrong, f"Only grey images allow data.bits={bits}")
    return rgb, used_bits


def _is_wide_grey(image: Image.Image) -> bool:
    # "I": Pillow before 11
    return image.mode.startswith("I;16") or (
        image.mode == "I" and image.format == "PNG"
    )


def to_rgb(image: Image.Image, bits: int = 16) -> Image.Image:
    """Return an opened image as upright RGB, 8 bits per channel.

    Beyond: the range of its values is unknown.

    Transparent pixels are blended over white; dropping the alpha channel would show
    hidden colours. 16-bit grey keeps the upper 8 of `bits`, as Pillow does of 16 for
    16-bit RGB. CMYK uses Pillow's formula. An animation gives its first frame. The EXIF
    orientation is applied, to the opened image too, and removed. Not handled: colour
    profiles.
    """
    try:
        image.getexif()  # Pillow caches parsed EXIF
        # exif_transpose would write it anew: 12 ms for 900 tags
        for name in ("exif", "Raw profile type exif"):
            image.info.pop(name, None)
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # a broken EXIF block is ignored
        pass
    if _is_wide_grey(image):
        # convert() would clip at 255 and give a white image
        upper = np.asarray(image).astype(np.uint16) >> (bits - 8)
        rgb = Image.fromarray(upper.astype(np.uint8)).convert("RGB")
    elif image.mode in ("I", "F"):
        raise Beyond(
            "bits",
            f"has {image.mode} pixels, of no known range",
            "Convert it to 8 or 16 bits per channel",
        )
    elif image.getbands()[-1] in ("A", "a") or "transparency" in image.info:
        canvas = Image.new("RGBA", image.size, "white")
        canvas.alpha_composite(image.convert("RGBA"))
        rgb = canvas.convert("RGB")
    elif image.format == "JPEG" and image.mode == "RGB":
        rgb = image  # a copy takes a tenth of the decoding time
    else:
        # a copy, also of RGB, without a reference to the file
        rgb = image.convert("RGB")
    rgb.info.clear()  # also for an EXIF block that Pillow could not parse
    return rgb


def centre_crop(image: Image.Image, size: int, crop: float) -> Image.Image:
    """Crop the centre of an RGB image and resize it (bicubic) to `size` pixels.

    The crop has `crop` times the image's shorter side.
    """
    side = max(1.0, min(image.width, image.height) * crop)
    left = (image.width - side) / 2
    top = (image.height - side) / 2
    box = (left, top, left + side, top + side)
    return image.resize(
        (size, size), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0
    )


def planes(image: Image.Image, size: int, crop: float) -> np.ndarray:
    """Return the `centre_crop` of an RGB image as the graphs take it.

    The result is uint8 [3, size, size].
    """
    pixels = np.asarray(centre_crop(image, size, crop))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


# the transparent colour is that of the centre, so that pixels have it
CENTRE = "centre"
# an EXIF block of one short
ORIENTATION = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0%c\0\0\0\0\0\0"
TURNED = ({"exif": ORIENTATION % orientation} for orientation in range(2, 9))
BRANCHES = (
    *product(["JPEG"], ["RGB", "L", "CMYK"], [1.5], [{}]),
    # decoded at 1/2, 1/4 and 1/8 of its sides; enlarged
    *product(["JPEG"], ["RGB"], [4, 8, 16, 0.5], [{}]),
    *product(
        ["JPEG"],
        ["RGB"],
        [1.5],
        [{"progressive": True}, {"subsampling": 0}, {"subsampling": 1}, *TURNED],
    ),
    *product(["PNG"], ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"], [1.5], [{}]),
    *product(["PNG"], ["P", "L", "RGB"], [1.5], [{"transparency": CENTRE}]),
    *product(["WEBP", "HEIF"], ["RGB", "RGBA"], [1.5], [{}]),
    *product(["PNG", "WEBP"], ["RGB"], [1.5], [{"exif": ORIENTATION % 6}]),
)
"""The branches of the decoder, Pillow's and `to_rgb`'s, as images that take them:
format, mode, shorter side over that of the crop, options of `Image.save`. A self-check
has an image of each. Pillow cannot write, so no image has: colour of 16 bits a
channel, interlaced PNG, JPEG in RGB.
"""
