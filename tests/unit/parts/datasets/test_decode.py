"""Bytes to RGB: what images in the wild look like, and what is said of those that are
none.
"""

import io
import struct
import warnings
import zlib
from importlib import import_module

import numpy as np
import pytest
from PIL import Image, ImageCms

from kd.core.errors import DataError
from kd.files import pixels
from kd.files.pixels import FORMATS, Most, count_scans, format_of
from kd.parts.datasets._classes import name_labels
from kd.parts.datasets._columns import Categorical
from kd.parts.datasets._decode import decode_image
from kd.parts.datasets._splits import hold_out

RNG = np.random.default_rng(0)
NOISE = Image.fromarray(RNG.integers(0, 256, (24, 32, 3), np.uint8))
RED = (255, 0, 0)
WHITE = (255, 255, 255)


def stored(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def read(data: bytes) -> Image.Image:
    image, crc, *_ = decode_image(data, "file 'a/b.jpg'", "data.root")
    assert crc == zlib.crc32(data)
    assert getattr(image, "fp", None) is None  # nothing is left to be read
    assert image.mode == "RGB"
    assert image.info == {}
    return image


def chunk(kind: bytes, data: bytes) -> bytes:
    return (
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
    )


def png(
    width: int, height: int, depth: int, color: int, rows: bytes, *extra: bytes
) -> bytes:
    """Write a PNG by the specification: Pillow does not write every kind that
    it reads.
    """
    header = chunk(
        b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    )
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + b"".join(extra)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP"])
def test_rgb_survives_bit_for_bit(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    assert np.array_equal(
        np.asarray(read(stored(NOISE, kind, **options))), np.asarray(NOISE)
    )


@pytest.mark.parametrize("mode", ["L", "1", "P"])
def test_modes_without_alpha_look_as_pillow_shows_them(mode):
    image = NOISE.convert(mode)
    assert np.array_equal(
        np.asarray(read(stored(image))), np.asarray(image.convert("RGB"))
    )


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_transparent_pixels_become_white_and_half_ones_half_so(kind):
    image = Image.new("RGBA", (3, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 255, 0))
    image.putpixel((2, 0), (0, 0, 0, 128))
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    first, middle, last = np.asarray(read(stored(image, kind, **options)))[0].tolist()
    assert (first, middle) == ([255, 0, 0], [255, 255, 255])
    assert last == pytest.approx([127] * 3, abs=1)  # rounding of alpha 128


def test_grey_with_alpha_is_laid_on_white():
    image = Image.new("LA", (2, 1), (10, 255))
    image.putpixel((1, 0), (10, 0))
    assert np.asarray(read(stored(image))).tolist() == [[[10] * 3, [255] * 3]]


@pytest.mark.parametrize("transparency", [0, bytes([0, 255])], ids=["index", "bytes"])
def test_transparent_palette_entries_become_white(transparency):
    image = Image.new("P", (2, 1), 0)
    image.putpalette([0, 0, 255, 255, 0, 0])
    image.putpixel((1, 0), 1)
    assert np.asarray(read(stored(image, transparency=transparency))).tolist() == [
        [list(WHITE), list(RED)]
    ]


def test_colour_key_of_an_rgb_png_is_transparent():
    image = Image.new("RGB", (2, 1), (0, 0, 255))
    image.putpixel((0, 0), RED)
    assert np.asarray(read(stored(image, transparency=(0, 0, 255)))).tolist() == [
        [list(RED), list(WHITE)]
    ]


def test_sixteen_bit_grey_is_scaled_and_not_clipped():
    values = np.array([[0, 257 * 100, 65535]], np.uint16)
    grey = np.asarray(read(stored(Image.fromarray(values))))
    assert grey.tolist() == [[[0] * 3, [100] * 3, [255] * 3]]
    tiff = np.asarray(read(stored(Image.fromarray(values), "TIFF")))
    assert np.array_equal(tiff, grey)


def test_sixteen_bit_rgb_keeps_the_upper_bits():
    row = b"\0" + struct.pack(">6H", 257 * 10, 257 * 20, 257 * 30, 65535, 0, 32768)
    assert np.asarray(read(png(2, 1, 16, 2, row))).tolist() == [
        [[10, 20, 30], [255, 0, 128]]
    ]


def test_sixteen_bit_colour_key_does_not_break_the_image():
    row = b"\0" + struct.pack(">3H", 257 * 10, 257 * 20, 257 * 30)
    key = chunk(b"tRNS", struct.pack(">3H", 1, 2, 65535))
    assert read(png(1, 1, 16, 2, row, key)).getpixel((0, 0)) == (10, 20, 30)


def test_float_pixels_are_refused_with_the_reason():
    with pytest.raises(
        DataError, match=r"it has F pixels, .*; convert it to 8 or 16 bits"
    ):
        read(stored(Image.new("F", (2, 2), 0.5), "TIFF"))


def test_cmyk_jpeg_opens_with_the_right_colours():
    data = stored(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)
    assert (
        b"Adobe" in data[:64]
    )  # stored inverted, as Photoshop does: reading it plainly would give cyan
    assert read(data).getpixel((8, 8)) == pytest.approx(
        RED, abs=4
    )  # JPEG loses a little


def test_cmyk_tiff_is_not_inverted():
    assert (
        read(stored(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "TIFF")).getpixel(
            (0, 0)
        )
        == RED
    )


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_orientation_is_applied_once(kind, orientation):
    pixels = np.asarray(NOISE)
    # EXIF 2.3, tag 274: how the stored rows and columns are to be shown.
    expected = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1),
        7: np.rot90(pixels, 2).transpose(1, 0, 2),
        8: np.rot90(pixels, 1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = read(stored(NOISE, kind, exif=exif))
    assert np.array_equal(np.asarray(image), expected)
    assert not image.getexif()


def test_turning_an_image_does_not_write_its_exif_anew(monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = {kind: stored(NOISE, kind, exif=exif) for kind in ("JPEG", "PNG", "WEBP")}
    monkeypatch.setattr(Image.Exif, "tobytes", lambda *_: pytest.fail("written"))
    for content in data.values():
        assert read(content).size == (NOISE.height, NOISE.width)


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0garbage",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01",
        b"Exif\0\0MM\0*\0\0\xff\0",
    ],
)
def test_broken_exif_costs_neither_the_image_nor_a_warning(exif):
    assert read(stored(NOISE, "JPEG", exif=exif)).size == NOISE.size


def test_an_animation_is_its_first_frame():
    frames = [Image.new("RGB", (4, 4), color) for color in (RED, (0, 255, 0))]
    for kind in ("GIF", "WEBP", "PNG"):
        data = stored(
            frames[0],
            kind,
            save_all=True,
            append_images=frames[1:],
            **({"lossless": True} if kind == "WEBP" else {}),
        )
        assert read(data).getpixel((0, 0)) == RED


def test_a_phone_burst_is_its_first_picture():
    data = stored(
        Image.new("RGB", (16, 16), RED),
        "MPO",
        save_all=True,
        append_images=[Image.new("RGB", (16, 16))],
    )
    assert read(data).getpixel((0, 0)) == pytest.approx(
        RED, abs=4
    )  # JPEG loses a little


def scans(jpeg: bytes, count: int) -> bytes:
    """Repeat a scan of a progressive JPEG `count` times."""
    first = jpeg.index(b"\xff\xda")
    second = jpeg.index(b"\xff\xda", first + 2)
    return jpeg[:second] + jpeg[first:second] * count + jpeg[second:]


def test_many_scans_are_refused_for_every_jpeg_format_name():
    """A second picture behind the first makes an MPO; its scans and those of a
    thumbnail are not decoded.
    """
    plain = stored(NOISE, "JPEG", progressive=True)
    burst = stored(
        NOISE, "MPO", save_all=True, append_images=[NOISE] * 9, progressive=True
    )
    scan_count = count_scans(plain)
    assert scan_count == plain.count(b"\xff\xda")
    assert count_scans(burst) == scan_count
    assert burst.count(b"\xff\xda") > 64
    assert Image.open(io.BytesIO(burst)).format == "MPO"
    assert np.array_equal(np.asarray(read(burst)), np.asarray(read(plain)))
    thumbnail = b"\xff\xe1" + struct.pack(">H", 2 + 2000) + b"\xff\xda\0\2" * 500
    assert np.array_equal(
        np.asarray(read(plain[:2] + thumbnail + plain[2:])), np.asarray(read(plain))
    )
    assert read(scans(burst, Most().scans - scan_count)).size == NOISE.size
    for data in (plain, burst):
        assert count_scans(scans(data, 100)) == scan_count + 100
        with pytest.raises(DataError, match=f"a JPEG of {scan_count + 100} scans"):
            read(scans(data, 100))


def test_colour_profile_is_dropped_with_the_rest_of_the_metadata():
    """The pixels are those of the same file without a profile."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    with_profile = stored(NOISE, "JPEG", icc_profile=profile)
    without = stored(NOISE, "JPEG")
    assert Image.open(io.BytesIO(with_profile)).info["icc_profile"] == profile
    image = read(with_profile)
    assert "icc_profile" not in image.info
    assert np.array_equal(np.asarray(image), np.asarray(read(without)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP", "BMP", "GIF"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_an_image_that_is_cut_short_is_refused(kind, share):
    data = stored(NOISE.resize((200, 150)), kind)
    with pytest.raises(
        DataError,
        match=(
            r"^data\.root: file 'a/b\.jpg': (the image (is trunc|cannot be dec)|it is"
            r" not)"
        ),
    ):
        read(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"file 'a/b.jpg': it is empty \(0 bytes\)"),
        (
            b"<!DOCTYPE html>\n",
            r"file 'a/b\.jpg': it is not an image .it begins with b'<!DOCTYPE html>",
        ),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n",
            "it is not an image",
        ),
        (
            stored(NOISE, "JPEG")[:3],
            "the image is truncated or damaged in its first bytes",
        ),
        (stored(NOISE, "JPEG")[:30], "the image is truncated"),
    ],
)
def test_bytes_that_are_no_image_are_refused(data, message):
    """PostScript is not handed to another program."""
    with pytest.raises(DataError, match=message):
        read(data)


@pytest.mark.parametrize(
    "pillow", [10_000, None], ids=["Pillow has a limit", "none, as in an endpoint"]
)
@pytest.mark.parametrize(
    "side", [90, 110, 300], ids=["within", "warned by Pillow", "refused by Pillow"]
)
def test_a_decompression_bomb_is_refused(side, pillow, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillow)
    monkeypatch.setattr(pixels, "MOST", Most(pixels=10_000))
    data = stored(Image.new("L", (side, side)))
    if side == 90:
        assert read(data).size == (90, 90)
    else:
        with pytest.raises(
            DataError, match=r"the image is beyond a limit: it has .*pixels"
        ):
            read(data)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP", "GIF", "BMP"])
def test_damage_anywhere_gives_an_image_or_a_data_error(kind, seed, monkeypatch):
    """Each other time in the first bytes: of a BMP, only damage to these can be
    noticed. A PNG has checksums.
    """
    monkeypatch.setattr(pixels, "MOST", Most(pixels=10_000))
    rng = np.random.default_rng(seed)
    data = np.frombuffer(stored(NOISE, kind), np.uint8)
    refused = 0
    for trial in range(60):
        damaged = data.copy()
        damaged[rng.integers(0, len(data) if trial % 2 else 40, 4)] = rng.integers(
            0, 256, 4
        )
        try:
            read(damaged.tobytes())
        except DataError:  # nothing else may come out
            refused += 1
    assert refused >= (55 if kind == "PNG" else 10)


def test_filters_of_the_caller_are_left_as_they_were():
    before = list(warnings.filters)
    read(stored(NOISE))
    assert warnings.filters == before


def test_hold_out_keeps_one_image_on_either_side():
    for fraction in (0.01, 0.99):
        assert hold_out([b"a", b"b", b"c"], np.zeros(3, int), fraction).sum() in (1, 2)


def test_labels_stay_as_written():
    def named(*raw: str, names: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
        column, order = name_labels(Categorical.from_values(raw), names)
        return [column.categories[code] for code in column.codes], order

    assert named("1", "003", "1") == (["1", "3", "1"], ["0", "1", "2", "3"])
    assert named("pear", "7up") == (["pear", "7up"], ["7up", "pear"])
    assert named("1", "apple", names=("pear", "apple")) == (
        ["apple", "apple"],
        ["pear", "apple"],
    )
    assert named("9", "-1", names=("pear", "apple")) == (["9", "-1"], ["pear", "apple"])


def test_only_a_box_of_a_file_type_names_a_brand():
    assert [
        format_of(bytes(4) + kind + b"avif" + bytes(4)) for kind in (b"ftyp", b"moov")
    ] == ["AVIF", ""]


def test_avif_is_read_where_pillow_reads_it():
    if "AVIF" not in FORMATS:
        pytest.skip("this Pillow has no AVIF")
    data = stored(NOISE.resize((64, 48)), "AVIF", quality=95, subsampling="4:4:4")
    difference = np.asarray(read(data), int) - np.asarray(NOISE.resize((64, 48)), int)
    assert abs(difference).mean() < 4
    with pytest.raises(DataError, match=r"damaged"):
        read(data[:40])


def test_heic_is_read_with_the_extra_and_names_it_without():
    if "HEIF" not in FORMATS:
        with pytest.raises(
            DataError,
            match=(
                r"its content is \.heic \(pillow-heif reads them: pip install"
                r" 'PATH/kd\[heic\]'"
            ),
        ):
            read(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
        pytest.skip("pillow-heif is not installed: no image was read")
    image = NOISE.resize((4, 3)).resize((64, 48))
    heif = import_module("pillow_heif")
    heif.register_heif_opener()
    for orientation, size in ((1, (64, 48)), (6, (48, 64))):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = stored(image, "HEIF", quality=95, exif=exif.tobytes())
        expected = np.asarray(
            image if orientation == 1 else image.transpose(Image.Transpose.ROTATE_270),
            int,
        )
        opened = read(data)
        assert opened.size == size
        assert abs(np.asarray(opened, int) - expected).mean() < 6
    with pytest.raises(DataError, match=r"damaged|truncated|cannot be decoded"):
        read(data[: len(data) // 2])


def grey16(bits: int, size: int = 8) -> Image.Image:
    values = np.arange(size * size, dtype=np.uint16).reshape(size, size) << (bits - 6)
    return Image.fromarray(values)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_the_bits_of_16_are_a_range_for_all_images(kind):
    """A camera's 12 bits in 16: the range is `data.bits` of them, for every image
    alike; larger values are no image.
    """
    data = stored(grey16(12), kind)
    decoded = decode_image(data, "file", "data.root")
    assert (decoded.used_bits, max(np.asarray(decoded.image).ravel())) == (
        12,
        63 * 64 >> 8,
    )  # nearly black
    scaled = decode_image(data, "file", "data.root", bits=12).image
    assert np.array_equal(np.asarray(scaled)[..., 0], np.arange(64).reshape(8, 8) * 4)
    with pytest.raises(
        DataError, match=r"values of 14 bits; at most 12, as data\.bits says"
    ):
        decode_image(stored(grey16(14), kind), "file", "data.root", bits=12)
    plain = decode_image(stored(NOISE, kind), "file", "data.root", bits=12)
    assert (
        plain.used_bits,
        np.array_equal(np.asarray(plain.image), np.asarray(NOISE)),
    ) == (
        0,
        True,
    )


def test_sixteen_bits_in_colour_cannot_be_scaled():
    """Pillow keeps the upper 8 bits of them, so that they cannot be scaled."""
    rows = b"".join(b"\0" + struct.pack(">6H", 4095, 0, 9, 1, 2, 3) for _ in range(2))
    data = png(2, 2, 16, 2, rows)
    assert decode_image(data, "file", "data.root").used_bits == -12
    with pytest.raises(
        DataError,
        match=r"16 bits a channel in colour; only grey images allow data\.bits=12",
    ):
        decode_image(data, "file", "data.root", bits=12)
