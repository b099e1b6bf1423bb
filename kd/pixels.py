"""What a model sees of a file: an opened image to RGB, and the crop of evaluation.

Training, evaluation and the endpoint take both from here, so that the same file gives the same pixels everywhere. The
file needs nothing but Pillow and NumPy, and nothing of kd: the endpoint runs without torch, and `kd-export --sagemaker`
ships it as it is.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

EXIF_ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an opened image as RGB, 8 bits a channel, upright.

    Transparent pixels are laid over white, as the pages that such pictures were drawn for; dropping the alpha channel
    instead would show whatever colour the file hides there. 16-bit grey keeps its upper 8 bits (what Pillow does to
    16-bit RGB), CMYK goes through Pillow's plain formula, of an animation the first frame is taken, and the EXIF
    orientation is applied and removed. Not handled: colour profiles.

    Raises:
        ValueError: pixels without a known range.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):  # "I": Pillow before 11
        upper = np.asarray(image).astype(np.uint16) >> 8  # convert() would clip at 255: a white image
        rgb = Image.fromarray(upper.astype(np.uint8)).convert("RGB")
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range; 8 or 16 bits a channel have")
    elif image.getbands()[-1] in ("A", "a") or "transparency" in image.info:
        canvas = Image.new("RGBA", image.size, "white")
        canvas.alpha_composite(image.convert("RGBA"))
        rgb = canvas.convert("RGB")
    else:
        rgb = image.convert("RGB")  # a copy even of RGB, free of the file behind it
    turn = _turn(image)
    if turn is not None:
        rgb = rgb.transpose(turn)
    rgb.info.clear()  # it still holds the EXIF: whoever applied that again would turn the image twice
    return rgb


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        return TURNS.get(image.getexif().get(EXIF_ORIENTATION, 1))
    except Exception:  # a broken EXIF block does not make the pixels worse
        return None


def centre_crop(image: Image.Image, size: int, crop: float) -> Image.Image:
    """Crop the centre and resize it (bicubic); nothing random.

    Args:
        image: RGB.
        size: side of the result, pixels.
        crop: share of the shorter side that the crop keeps.
    """
    side = max(1.0, min(image.width, image.height) * crop)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
