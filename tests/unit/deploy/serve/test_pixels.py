"""The endpoint sees what evaluation saw: the same bits as training's decoder, and
nearly timm's transform.
"""

import io
import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from kd.core.errors import CorruptImage
from kd.data.views import EvalTransform
from kd.deploy.serve.decoding import prepare
from kd.deploy.serve.limits import Limits, Problem
from kd.files.pixels import MARGIN
from kd.parts.datasets._decode import decode_image

SIZES = [(16, 16), (20, 20), (21, 20), (37, 64), (300, 201), (97, 640), (1200, 900)]
MODES = ["RGB", "L", "P", "RGBA", "LA", "1", "CMYK", "I;16"]


def file_of(
    width: int, height: int, mode: str = "RGB", kind: str = "PNG", **options: object
) -> bytes:
    """Return an image file with structure at every scale."""
    generator = np.random.default_rng(width * 1000 + height)
    coarse = Image.fromarray(generator.integers(0, 256, (7, 9, 3), np.uint8)).resize(
        (width, height), 3
    )
    pixels = np.asarray(coarse).astype(int) + generator.integers(
        -20, 21, (height, width, 3)
    )
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    if mode == "I;16":
        image = Image.fromarray(
            generator.integers(0, 65536, (height, width), np.uint16)
        )
    elif mode in ("RGBA", "LA"):
        image.putalpha(
            Image.fromarray(generator.integers(0, 256, (height, width), np.uint8))
        )
        image = image.convert(mode)
    elif mode != "RGB":
        image = image.convert(mode)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def evaluated(data: bytes, size: int, crop: float) -> np.ndarray:
    """Return what the validation split's view of this file is."""
    transform = EvalTransform(size, crop)
    image = transform(
        decode_image(data, "file", "data", transform.least).image, random.Random(0)
    )
    return np.asarray(image).transpose(2, 0, 1)


@pytest.mark.parametrize("crop", [1.0, 0.875])
@pytest.mark.parametrize("size", SIZES)
def test_all_sizes_give_the_pixels_of_evaluation(size, crop):
    data = file_of(*size)
    assert np.array_equal(
        prepare(data, 32, crop, Limits()).pixels, evaluated(data, 32, crop)
    )


@pytest.mark.parametrize("mode", MODES)
def test_all_modes_give_the_pixels_of_evaluation(mode):
    kind = "JPEG" if mode == "CMYK" else "PNG"
    data = file_of(50, 40, mode, kind)
    with Image.open(io.BytesIO(data)) as image:
        assert image.mode == mode
    assert np.array_equal(
        prepare(data, 24, 1.0, Limits()).pixels, evaluated(data, 24, 1.0)
    )


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_turns_the_picture_as_in_evaluation(turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    data = file_of(40, 30, kind="JPEG", exif=exif)
    pixels = prepare(data, 24, 1.0, Limits()).pixels
    assert np.array_equal(pixels, evaluated(data, 24, 1.0))
    assert (turn == 1) == np.array_equal(
        pixels, evaluated(file_of(40, 30, kind="JPEG"), 24, 1.0)
    )


@pytest.mark.parametrize("turn", [1, 6])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}], ids=["baseline", "progressive"]
)
def test_a_large_jpeg_is_reduced_as_it_is_decoded(mode, options, turn):
    """The same pixels for evaluation and the endpoint, near to those of the whole
    picture, and the size before it.
    """
    exif = Image.Exif()
    exif[0x0112] = turn
    data = file_of(1201, 900, mode, "JPEG", exif=exif, quality=92, **options)
    prepared = prepare(data, 96, 0.875, Limits())
    full = prepare(data, 96, 0.875, Limits(), margin=0)
    assert np.array_equal(prepared.pixels, evaluated(data, 96, 0.875))
    assert prepared.summary == full.summary == f"1201x900 {mode} JPEG"
    apart = np.abs(prepared.pixels.astype(int) - full.pixels.astype(int))
    assert 0 < apart.mean() < 1
    assert apart.max() <= 12
    reduced = decode_image(
        data, "file", "data", EvalTransform(96, 0.875).least
    ).image.size
    assert reduced == ((301, 225) if turn == 1 else (225, 301))


@pytest.mark.parametrize(
    ("least", "side"),
    [(0.5, 1600), (0.34, 1600), (0.33, 800), (0.166, 400), (0.083, 200), (0.001, 200)],
)
def test_a_reduction_leaves_the_margin(least, side):
    data = file_of(1600, 40, "L", "JPEG")
    assert (
        decode_image(data, "file", "data", lambda width, height: least).image.width
        == side
    )
    assert side == 200 or side >= MARGIN * least * 1600 or side == 1600


@pytest.fixture(scope="module")
def large() -> bytes:
    """Return a JPEG of 12 million pixels."""
    file = io.BytesIO()
    Image.effect_noise((1000, 750), 40).resize((4000, 3000)).convert("RGB").save(
        file, "JPEG", quality=60
    )
    return file.getvalue()


def with_header(
    data: bytes, height: int = 3000, width: int = 4000, bits: int = 8
) -> bytes:
    """Return a JPEG whose header says something else."""
    start = data.index(b"\xff\xc0")
    frame = bytes([0xC0 if bits == 8 else 0xC1]) + data[start + 2 : start + 4]
    frame += bytes([bits, *height.to_bytes(2, "big"), *width.to_bytes(2, "big")])
    return data[: start + 1] + frame + data[start + 9 :]


BAD: dict[str, tuple[Callable[[bytes], bytes], str, int]] = {
    **{
        f"cut at {n} tenths": (
            lambda data, n=n: data[: len(data) * n // 10],
            "truncated|empty",
            400,
        )
        for n in range(10)
    },
    "12 bits": (lambda data: with_header(data, bits=12), "damaged", 400),
    "65,500 x 65,500": (
        lambda data: with_header(data, 65_500, 65_500),
        "beyond a limit",
        413,
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_photograph_is_refused_in_one_line(case, large):
    """Training has its own limit on pixels: in a process that imports the endpoint,
    Pillow has none.
    """
    make, words, status = BAD[case]
    with pytest.raises(CorruptImage, match=words) as refused:
        decode_image(
            make(large), "file 'a.jpg'", "data.root", EvalTransform(64, 1.0).least
        )
    assert re.fullmatch(
        r"data\.root: file 'a\.jpg': .*\. Allowed: .*\. Replace or delete it.*",
        str(refused.value),
    )
    with pytest.raises(Problem) as caught:
        prepare(make(large), 64, 1.0, Limits())
    assert caught.value.status == status
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("height", "width"), [(6000, 4000), (1500, 4000), (3000, 8000)]
)
def test_a_header_that_lies_about_the_size_gives_the_same_pixels_everywhere(
    height, width, large
):
    """libjpeg makes up what is missing, so that nothing tells."""
    lie = with_header(large, height, width)
    assert np.array_equal(
        prepare(lie, 64, 1.0, Limits(max_pixels=10**8)).pixels, evaluated(lie, 64, 1.0)
    )


def test_a_line_of_65000_pixels_is_an_image_for_training_and_none_for_the_endpoint():
    line = file_of(65_000, 1, kind="JPEG")
    assert evaluated(line, 32, 1.0).shape == (3, 32, 32)
    with pytest.raises(Problem, match="65000 x 1"):
        prepare(line, 32, 1.0, Limits())


@pytest.mark.parametrize(
    ("kind", "side", "max_pixels"),
    [("JPEG", 64, 421_875), ("JPEG", 1200, 1_080_000), ("PNG", 64, 1_080_000)],
)
def test_the_limit_counts_what_is_held(kind, side, max_pixels):
    """1,080,000 pixels; a JPEG that is reduced has one of 64 of them, and may have 2.56
    times the limit.
    """
    data = file_of(1200, 900, "L", kind)
    prepare(data, side, 1.0, Limits(max_pixels=max_pixels))
    with pytest.raises(Problem, match="1200 x 900") as caught:
        prepare(data, side, 1.0, Limits(max_pixels=max_pixels - 1))
    assert caught.value.status == 413


def test_the_coefficients_of_a_progressive_jpeg_are_held():
    """libjpeg keeps 2 bytes of each pixel and channel until the last scan, whatever it
    reduces the picture to.
    """
    plain, progressive = (
        file_of(1200, 900, kind="JPEG", progressive=several)
        for several in (False, True)
    )
    full = 1200 * 900
    reduced = 150 * 113
    prepare(plain, 16, 1.0, Limits(max_pixels=421_875))
    prepare(progressive, 16, 1.0, Limits(max_pixels=421_875 + reduced))
    with pytest.raises(Problem, match="memory") as caught:
        prepare(progressive, 16, 1.0, Limits(max_pixels=421_875))
    assert 3 / 8 * full + reduced > 421_875
    assert caught.value.status == 413


def apart(size: tuple[int, int], crop: float) -> torch.Tensor:
    """Return the distance between our pixels and those of timm's transform, in levels
    of 0..255.
    """
    from timm.data import create_transform

    data = file_of(*size, kind="JPEG", quality=90)
    prepared = torch.from_numpy(
        prepare(data, 64, crop, Limits(), margin=0).pixels
    ).float()
    transform = create_transform(
        (3, 64, 64),
        interpolation="bicubic",
        crop_pct=crop,
        mean=(0, 0, 0),
        std=(1, 1, 1),
    )
    return (prepared - 255 * transform(Image.open(io.BytesIO(data)))).abs()


@pytest.mark.parametrize("size", [(64, 64), (90, 90), (224, 224), (640, 640)])
def test_it_is_timms_transform_where_nothing_is_rounded(size):
    assert apart(size, 1.0).max() <= 1.001


@pytest.mark.parametrize("crop", [1.0, 0.875])
@pytest.mark.parametrize("size", [(300, 201), (97, 640), (1200, 900), (224, 224)])
def test_it_is_nearly_timms_transform_elsewhere(size, crop):
    """timm resizes to whole pixels and then crops at whole pixels; we do both at once,
    up to half a pixel apart.

    The pictures are as steep as can be: colour fields of seven pixels. On them half a
    pixel is eight levels.
    """
    difference = apart(size, crop)
    assert difference.mean() < 8
    assert difference.max() < 40
