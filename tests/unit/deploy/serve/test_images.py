"""What the endpoint refuses, and with which status, before it costs anything."""

import io
import struct
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from kd.deploy.serve.decoding import FORMATS, NAMES, check_together, open_image, prepare
from kd.deploy.serve.limits import Limits, Problem


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def refused(data: bytes, **limits: float) -> tuple[int, str]:
    with pytest.raises(Problem) as caught:
        prepare(data, 16, 1.0, Limits(**limits))
    return caught.value.status, caught.value.detail


def bomb(width: int, height: int) -> bytes:
    """A PNG of one colour: kilobytes that decode to gigabytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    row = zlib.compressobj()
    rows = (
        b"".join(
            row.compress(bytes(1 + min(width, 20_000) // 8))
            for _ in range(min(height, 2000))
        )
        + row.flush()
    )
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", rows)
        + chunk(b"IEND", b"")
    )


PHOTO = Image.fromarray(
    np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
)


@pytest.mark.parametrize("kind", FORMATS)
def test_all_our_formats_are_taken(kind):
    assert prepare(saved(PHOTO, kind), 16, 1.0, Limits()).summary == f"60x40 RGB {kind}"


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "PPM", "ICO", "EPS", "TGA"])
def test_other_formats_are_refused(kind):
    status, detail = refused(saved(PHOTO, kind))
    assert (status, detail) == (
        415,
        f"This is not an image in one of the formats {', '.join(NAMES)}.",
    )


@pytest.mark.parametrize(
    "data",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"\0" * 100,
        b"GIF89a",
        b"%!PS-Adobe",
    ],
)
def test_bytes_that_are_no_image_are_refused(data):
    assert refused(data)[0] == 415


def test_an_empty_image_is_refused():
    assert refused(b"") == (400, "The image is empty (0 bytes).")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 0.7, 0.98])
def test_cut_files_are_refused(kind, share):
    data = saved(PHOTO, kind)
    status, _ = refused(data[: max(4, int(share * len(data)))])
    assert status == 400 or (status == 415 and share < 0.02)


@pytest.mark.parametrize("side", [5001, 9000, 20_000, 2**31 - 1])
def test_bombs_are_refused_by_their_header(side):
    data = bomb(side, side)
    start = time.process_time()
    status, detail = refused(data)
    assert time.process_time() - start < 0.1
    assert status in (400, 413)
    assert status == 400 or detail.startswith(f"The image has {side} x {side} = ")


def test_the_limit_itself_is_allowed():
    assert prepare(
        saved(PHOTO, "PNG"), 16, 1.0, Limits(max_pixels=2400)
    ).pixels.shape == (3, 16, 16)
    assert refused(saved(PHOTO, "PNG"), max_pixels=2399)[0] == 413


@pytest.mark.parametrize(
    ("kind", "max_pixels"), [("PNG", 2400), ("JPEG", 938)]
)  # 2,400 pixels, and 2,400 / 2.56
def test_the_pixels_of_all_images_together_are_limited(kind, max_pixels):
    """The limit is on CPU time: it counts what the header says, also where most of a
    JPEG is left out.
    """
    data = saved(PHOTO, kind)

    def together(count: int, **limits: int) -> None:
        each = Limits(**limits)
        check_together([open_image(data, 1, 1.0, each) for _ in range(count)], each)

    together(2, max_pixels=max_pixels)
    together(3, max_pixels=3 * max_pixels // 2)
    with pytest.raises(Problem, match="together") as caught:
        together(3, max_pixels=max_pixels)
    assert caught.value.status == 413


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (3, 60), (60, 3)])
def test_too_small_images_are_refused(size):
    assert refused(saved(Image.new("RGB", size), "PNG"))[0] == 422


@pytest.mark.parametrize("size", [(60_000, 4), (4, 60_000), (2001, 100)])
def test_too_long_images_are_refused(size):
    status, detail = refused(saved(Image.new("RGB", size), "PNG"))
    assert status == 422
    assert detail.endswith("The longer side may be 20 times the shorter one.")


@pytest.mark.parametrize("kind", ["JPEG", "MPO"])
def test_a_jpeg_of_too_many_scans_is_refused(kind):
    """A crafted progressive file repeats a scan of a few bytes thousands of times; each
    is a pass over all pixels.
    """
    options = {"save_all": True, "append_images": [PHOTO] * 9} if kind == "MPO" else {}
    data = saved(PHOTO, kind, progressive=True, **options)
    first = data.index(b"\xff\xda")
    second = data.index(b"\xff\xda", first + 2)
    crafted = data[:second] + data[first:second] * 200 + data[second:]
    status, detail = refused(crafted)
    assert (status, detail.endswith("At most 64.")) == (422, True)
    assert prepare(data, 16, 1.0, Limits()).summary == "60x40 RGB JPEG"


def test_the_limit_of_the_process_stays_its_own():
    code = (
        "from PIL import Image; before = Image.MAX_IMAGE_PIXELS; import"
        " kd.deploy.serve.decoding as one; "
    )
    code += "assert one.open_image and Image.MAX_IMAGE_PIXELS == before"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_limit_of_the_process_is_not_ours(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert prepare(saved(PHOTO, "PNG"), 16, 1.0, Limits()).pixels.shape == (3, 16, 16)
