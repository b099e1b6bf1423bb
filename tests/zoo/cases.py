"""The zoo: data as people bring it, made by small generators, and what is right for
each case.

A case is *right*, with the images of each class that are to be read and what must be
said of the rest, or *refused*, in one line whose remedy is followed: with it the case
is right. `benchmarks/zoo.py` runs the same folders through others.
"""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

RED = (200, 30, 30)
GREEN = (30, 200, 30)
BLUE = (30, 30, 200)
TWO = {"apple": 3, "pear": 3}
CAFE = "caf\xe9"  # é as one character
CAFE_MAC = "cafe\u0301"  # as macOS writes it: two
Keys = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One case."""

    name: str
    make: Callable[[Path], object]  # writes files into an empty folder
    right: Mapping[str, int] = field(
        default_factory=lambda: TWO
    )  # training images of each class, once it is right
    keys: Mapping[str, Any] = field(
        default_factory=dict
    )  # of `data`; "ROOT" in a text is the folder
    message: str = ""  # what must be said though it is right: a pattern
    refused: str = ""  # what the one line says: a pattern; "": it is right at once
    remedy: Callable[[Path, Keys], object] | None = (
        None  # does what that line says to files or keys
    )
    order: tuple[str, ...] = ()  # of the classes, where it matters
    pixels: Callable[[Image.Image], bool] | None = None  # of the first training image
    kind: str = "folder"  # folder, table, shards, parquet


# --------------------------------------------------------------------------------
# pictures


def picture(
    seed: int = 0, size: tuple[int, int] = (16, 12), colour: tuple[int, int, int] = RED
) -> Image.Image:
    noise = np.random.default_rng(seed).integers(-20, 20, (size[1], size[0], 3))
    return Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def photo(seed: int = 0, kind: str = "JPEG", **options: Any) -> bytes:
    return encoded(picture(seed), kind, **options)


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def plain(
    root: Path,
    classes: tuple[str, ...] = ("apple", "pear"),
    ending: str = ".jpg",
    count: int = 3,
) -> Path:
    """Write `train` and `val` folders of classes."""
    for place, name in enumerate(classes):
        for number in range(count):
            write(
                root / "train" / name / f"{number}{ending}", photo(10 * place + number)
            )
        write(root / "val" / name / f"v{ending}", photo(100 + place))
    return root


def beside(name: str, data: bytes | str) -> Callable[[Path], object]:
    """Two plain classes, and one more file in `train`."""
    return lambda root: write(plain(root) / "train" / name, data)


def first(data: Callable[[], bytes], name: str = "0.jpg") -> Callable[[Path], object]:
    """Two plain classes; the first training image is this one."""

    def make(root: Path) -> None:
        plain(root)
        (root / "train/apple/0.jpg").unlink()
        write(root / "train/apple" / name, data())

    return make


def skip(root: Path, keys: Keys) -> None:
    keys.update(on_corrupt="skip", max_skipped=0.5)


def delete(name: str) -> Callable[[Path, Keys], object]:
    return lambda root, keys: (root / name).unlink()


def sets(**values: Any) -> Callable[[Path, Keys], object]:
    return lambda root, keys: keys.update(values)


def scans(jpeg: bytes, copies: int) -> bytes:
    start = jpeg.index(b"\xff\xda")
    second = jpeg.index(b"\xff\xda", start + 2)
    return jpeg[:second] + jpeg[start:second] * copies + jpeg[second:]


def burst() -> bytes:
    """A JPEG with further pictures behind the first, as phones write them: Pillow calls
    it MPO.
    """
    return encoded(
        picture(1),
        "MPO",
        save_all=True,
        append_images=[picture(2, colour=BLUE)] * 2,
        progressive=True,
    )


def grey16(bits: int) -> bytes:
    values = np.linspace(0, 2**bits - 1, 16 * 12).astype(np.uint16).reshape(12, 16)
    return encoded(Image.fromarray(values), "PNG")


def bomb() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data))
            + kind
            + data
            + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + chunk(b"IDAT", zlib.compress(bytes(100)))
        + chunk(b"IEND", b"")
    )


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(1, (16, 12)), "JPEG", exif=exif)


def palette() -> bytes:
    image = Image.new("P", (16, 12), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    return encoded(image, "PNG", transparency=0)


def is_red(image: Image.Image) -> bool:
    red, green, blue = np.asarray(image.convert("RGB"), float).mean((0, 1))
    return red > 150 and green < 90 and blue < 90


def is_bright(image: Image.Image) -> bool:
    return int(np.asarray(image.convert("RGB")).max()) > 240


def is_white(image: Image.Image) -> bool:
    return int(np.asarray(image.convert("RGB")).min()) > 240


def link(name: str, target: str) -> Callable[[Path], object]:
    def make(root: Path) -> None:
        plain(root)
        write(root.parent / f"{root.name}-store" / "p" / "far.jpg", photo(7))
        (root / name).symlink_to(
            target.replace("STORE", f"{root.parent / f'{root.name}-store'}")
        )

    return make


def not_utf8(root: Path) -> None:
    plain(root)
    os.rename(
        os.fsencode(root / "train/apple/0.jpg"),
        os.fsencode(root / "train/apple/") + b"/\xe9.jpg",
    )


def two_forms(root: Path) -> None:
    plain(root, (CAFE, "pear"))
    write(root / "train" / CAFE_MAC / "9.jpg", photo(9))


def other_form(root: Path) -> None:
    plain(root, (CAFE, "pear"))
    (root / "val" / CAFE).rename(root / "val" / CAFE_MAC)


def renamed(before: str, after: str) -> Callable[[Path, Keys], object]:
    return lambda root, keys: (root / before).rename(root / after)


PEAR4 = {"apple": 3, "pear": 4}
LESS = {"apple": 2, "pear": 3}
NUMBERS = tuple(map(str, range(12)))

FOLDERS = [
    Case(
        "folders of storage systems",
        lambda root: (
            plain(root),
            write(
                root / "train" / "apple" / "@eaDir" / "0.jpg" / "SYNOPHOTO_THUMB_S.jpg",
                photo(7),
            ),
            write(root / "train" / "@eaDir" / "x.jpg", photo(8)),
            write(root / "__MACOSX" / "train" / "x.jpg", photo(9)),
        ),
    ),
    Case("plain", plain),
    Case("capital endings", lambda root: plain(root, ending=".JPG")),
    *[
        Case(f"JPEGs named {ending}", lambda root, e=ending: plain(root, ending=e))
        for ending in (".jfif", ".jpe")
    ],
    Case("JPEGs named .jpeg_large", lambda root: plain(root, ending=".jpeg_large")),
    Case(
        "three endings of JPEGs",
        lambda root: [plain(root), write(root / "train/pear/a.jfif", photo(8))],
        PEAR4,
    ),
    Case("no endings", lambda root: plain(root, ending="")),
    Case("dots in names, no endings", beside("pear/scan.4.5", photo(5)), PEAR4),
    Case("PNG named .jpg", first(lambda: photo(1, "PNG")), pixels=is_red),
    Case("a text beside the images", beside("pear/notes.txt", "x"), message="1 .txt"),
    Case("Thumbs.db", beside("pear/Thumbs.db", b"\xd0\xcf\x11\xe0"), message="1 .db"),
    Case("hidden files of macOS", beside("pear/._0.jpg", b"\0\5\x16\7")),
    Case(
        "a raw photograph", beside("pear/1.nef", b"II*\0" + bytes(64)), message="1 .nef"
    ),
    Case(
        "an empty class folder",
        lambda root: (plain(root) / "train/fig").mkdir(),
        message="1 folder has no image.*fig",
    ),
    Case(
        "nested classes",
        lambda root: plain(root, ("fruit/apple", "fruit/pear")),
        {"fruit/apple": 3, "fruit/pear": 3},
    ),
    Case(
        "classes in numbers",
        lambda root: plain(root, NUMBERS, count=1),
        dict.fromkeys(NUMBERS, 1),
        order=NUMBERS,
        message="order of numbers",
    ),
    Case(
        "classes 007 and no",
        lambda root: plain(root, ("007", "no")),
        {"007": 3, "no": 3},
    ),
    Case(
        "blanks, quotes and emoji",
        lambda root: plain(root, ("a 'b'", "\U0001f34e")),
        {"a 'b'": 3, "\U0001f34e": 3},
    ),
    Case("a name that is not UTF-8", not_utf8),
    Case("val in the other Unicode form", other_form, {CAFE: 3, "pear": 3}),
    Case("two Unicode forms in one split", two_forms, {CAFE: 4, "pear": 3}),
    Case("a link to a file", link("train/pear/l.jpg", "STORE/p/far.jpg"), PEAR4),
    Case("a link to a folder", link("train/plum", "STORE/p"), {**TWO, "plum": 1}),
    Case(
        "a link without a target",
        link("train/pear/l.jpg", "/nowhere/x.jpg"),
        refused="is a link to '/nowhere/x.jpg'",
        remedy=delete("train/pear/l.jpg"),
    ),
    Case(
        "such a link, skipped",
        link("train/pear/l.jpg", "/nowhere/x.jpg"),
        refused="on_corrupt=skip",
        remedy=skip,
    ),
    Case(
        "a link in a circle",
        link("train/pear/up", ".."),
        refused="link to a folder above",
        remedy=delete("train/pear/up"),
    ),
    Case(
        "an empty file",
        beside("pear/e.jpg", b""),
        refused="pear/e.jpg': it is empty",
        remedy=delete("train/pear/e.jpg"),
    ),
    Case(
        "an empty file, skipped",
        beside("pear/e.jpg", b""),
        refused="on_corrupt=skip",
        remedy=skip,
    ),
    Case(
        "a cut JPEG",
        beside("pear/c.jpg", photo(3)[:300]),
        refused="pear/c.jpg.*truncated",
        remedy=skip,
    ),
    Case(
        "a cut PNG",
        beside("pear/c.png", photo(3, "PNG")[:200]),
        refused="pear/c.png",
        remedy=skip,
    ),
    Case(
        "an HTML page named .jpg",
        beside("pear/h.jpg", "<!doctype html>"),
        refused="not an image",
        remedy=skip,
    ),
    Case(
        "an SVG named .png",
        beside("pear/s.png", "<svg/>"),
        refused="not an image",
        remedy=delete("train/pear/s.png"),
    ),
    Case(
        "a bomb",
        beside("pear/b.png", bomb()),
        refused="30000 x 30000.*million",
        remedy=skip,
    ),
    Case("an MPO", first(burst), pixels=is_red),
    Case(
        "an MPO of 2,000 scans",
        beside("pear/m.jpg", scans(burst(), 2000)),
        refused="JPEG of 20.. scans",
        remedy=skip,
    ),
    Case(
        "a JPEG of 2,000 scans",
        beside("pear/m.jpg", scans(photo(1, progressive=True), 2000)),
        refused="JPEG of 20.. scans",
        remedy=skip,
    ),
    Case(
        "a progressive JPEG", first(lambda: photo(1, progressive=True)), pixels=is_red
    ),
    Case("CMYK", first(lambda: encoded(picture(1).convert("CMYK"))), pixels=is_red),
    Case(
        "a turned photograph",
        first(turned),
        pixels=lambda image: image.size == (12, 16),
    ),
    Case("a palette with transparency", first(palette, "0.png"), pixels=is_white),
    Case(
        "an animation",
        first(
            lambda: encoded(
                picture(1),
                "GIF",
                save_all=True,
                append_images=[picture(2, colour=BLUE)],
            ),
            "0.gif",
        ),
        pixels=is_red,
    ),
    Case(
        "a TIFF of two pages",
        first(
            lambda: encoded(
                picture(1),
                "TIFF",
                save_all=True,
                append_images=[picture(2, colour=BLUE)],
            ),
            "0.tif",
        ),
        pixels=is_red,
    ),
    Case("16 bits", first(lambda: grey16(16), "0.png"), pixels=is_bright),
    Case(
        "12 bits in 16",
        first(lambda: grey16(12), "0.png"),
        keys={"bits": 12},
        pixels=is_bright,
    ),
    Case(
        "16 bits where 12 are said",
        first(lambda: grey16(16), "0.png"),
        keys={"bits": 12},
        pixels=is_bright,
        refused="values of 16 bits; at most 12, as data.bits says",
        remedy=sets(bits=16),
    ),
    Case(
        "numbers without a range",
        beside("pear/f.tif", encoded(Image.new("F", (8, 8), 0.5), "TIFF")),
        refused="F pixels",
        remedy=delete("train/pear/f.tif"),
    ),
    Case(
        "one pixel",
        first(lambda: encoded(Image.new("RGB", (1, 1), RED), "PNG"), "0.png"),
        pixels=is_red,
    ),
    Case(
        "a strip",
        first(lambda: encoded(Image.new("RGB", (3000, 2), RED), "PNG"), "0.png"),
        pixels=is_red,
    ),
    Case(
        "a broken EXIF block",
        first(lambda: photo(1, exif=b"Exif\0\0garbage")),
        pixels=is_red,
    ),
    Case("bytes behind the end", first(lambda: photo(1) + b"x" * 99), pixels=is_red),
    Case(
        "a class that training lacks",
        lambda root: write(plain(root) / "val/fig/1.jpg", photo(1)),
        refused="'val' has the class 'fig'",
        remedy=lambda root, keys: (root / "val/fig").rename(root / "fig"),
    ),
    Case(
        "validation called valid",
        lambda root: (plain(root) / "val").rename(root / "valid"),
        refused="no folder 'val'.*Did you mean 'valid'",
        remedy=sets(val_split="valid"),
    ),
    Case(
        "an image outside the classes",
        beside("0.jpg", photo(1)),
        refused="'train/0.jpg' lies outside",
        remedy=delete("train/0.jpg"),
    ),
    Case(
        "classes without splits",
        lambda root: [plain(root, count=4), os.rename(root / "train", root / "all")],
        refused="no folder 'train'.*val_fraction=0.1",
        remedy=lambda root, keys: keys.update(root=str(root / "all"), val_fraction=0.1),
    ),
]

# --------------------------------------------------------------------------------
# tables


def table(content: str | bytes, name: str = "t.csv") -> Callable[[Path], object]:
    """Images in `images`, and a list of the training images; that of validation is
    whole and plain.
    """

    def make(root: Path) -> None:
        for number in range(6):
            write(root / "images" / f"{number}.jpg", photo(number))
        write(root / "images" / "caf\xe9.jpg", photo(9))
        for number in (7, 8):
            write(root / "images" / f"v{number}.jpg", photo(number))
        write(root / "v.csv", "path,label\nimages/v7.jpg,apple\nimages/v8.jpg,pear\n")
        write(root / name, content)

    return make


ROWS = "".join(f"images/{n}.jpg,{'apple' if n < 3 else 'pear'}\n" for n in range(6))
HEAD = "path,label\n"
LIST = {"kind": "csv", "root": "ROOT", "train_list": "t.csv", "val_list": "v.csv"}
MEASURES = "".join(f"images/{n}.jpg,{1 + n / 10}\n" for n in range(6))


def listed(
    name: str,
    content: str | bytes,
    right: Mapping[str, int] = TWO,
    file: str = "t.csv",
    **fields: Any,
) -> Case:
    keys = fields.pop("keys", {**LIST, "train_list": file})
    return Case(name, table(content, file), right, keys, kind="table", **fields)


def rewrite(
    content: str | bytes, name: str = "t.csv"
) -> Callable[[Path, Keys], object]:
    return lambda root, keys: write(root / name, content)


def numbered(root: Path) -> None:
    table(HEAD + ROWS.replace("apple", "1").replace("pear", "2.0"))(root)
    write(root / "v.csv", "path,label\nimages/v7.jpg,1.0\nimages/v8.jpg,2\n")


def absolute(root: Path) -> None:
    table("")(root)
    write(root / "t.csv", HEAD + ROWS.replace("images/", f"{root}/images/"))


def roboflow(root: Path) -> None:
    """One folder a split, each with its images and a table: as Roboflow exports
    classes.
    """
    for split, count in (("train", 6), ("valid", 2)):
        for number in range(count):
            write(root / split / f"{split}{number}.jpg", photo(number))
        lines = [
            f"{split}{n}.jpg, {int(n % 2 == 0)}, {int(n % 2)}" for n in range(count)
        ]
        write(
            root / split / "_classes.csv", "\n".join(["filename, apple, fig", *lines])
        )


SETS = {
    "kind": "multilabel",
    "root": "ROOT",
    "train_labels": "train/_classes.csv",
    "val_labels": "valid/_classes.csv",
}
PAIRS = {
    "kind": "multilabel",
    "root": "ROOT",
    "train_labels": "t.csv",
    "val_fraction": 0.2,
}
JOINED = "file,labels\n" + "".join(
    f"images/{n}.jpg,{'apple|fig' if n % 2 else 'pear'}\n" for n in range(6)
)
WIDE = "file,apple,pear\n" + "".join(
    f"images/{n}.jpg,{int(n < 3)},{int(n > 2)}\n" for n in range(6)
)

TABLES = [
    listed("commas", HEAD + ROWS),
    listed("semicolons in a .csv", (HEAD + ROWS).replace(",", ";")),
    listed("tabs in a .csv", (HEAD + ROWS).replace(",", "\t")),
    listed("a first line sep=;", "sep=;\r\n" + (HEAD + ROWS).replace(",", ";")),
    listed("a byte order mark", "\ufeff" + HEAD + ROWS),
    listed("UTF-16", (HEAD + ROWS).encode("utf-16")),
    listed(
        "cp1252",
        (HEAD + ROWS + "images/caf\xe9.jpg,pear\n").encode("cp1252"),
        {"apple": 3, "pear": 4},
        refused=r"line 8 is not UTF-8.*iconv -f cp1252",
        remedy=rewrite(
            (HEAD + ROWS + "images/caf\xe9.jpg,pear\n")
            .encode("cp1252")
            .decode("cp1252")
        ),
    ),
    listed(
        "a name in the other Unicode form",
        HEAD + ROWS + f"images/{CAFE_MAC}.jpg,pear\n",
        {"apple": 3, "pear": 4},
    ),
    listed(
        "a row twice",
        HEAD + ROWS + "images/0.jpg,apple\n",
        message="1 lines of data.train_list repeat another",
    ),
    listed(
        "a row twice with two labels",
        HEAD + ROWS + "images/0.jpg,pear\n",
        refused="line 8.*is the image of line 2",
        remedy=rewrite(HEAD + ROWS),
    ),
    listed("empty last rows", HEAD + ROWS + ",\n,\n\n"),
    listed(
        "a quote that is not closed",
        HEAD + ROWS.replace("0.jpg,apple", '0.jpg,"apple'),
        refused=r"line \d+: a quote is not closed, or text follows a closing one",
        remedy=rewrite(HEAD + ROWS),
    ),
    listed(
        "text behind a closing quote",
        HEAD + ROWS.replace("0.jpg,apple", '0.jpg,"Oma" cake'),
        {'"Oma" cake': 1, "apple": 2, "pear": 3},
        refused=r"line 2: .*text follows a closing one.*twice",
        remedy=rewrite(HEAD + ROWS.replace("0.jpg,apple", '0.jpg,"""Oma"" cake"')),
    ),
    listed(
        "a quote that is closed four lines below",
        HEAD
        + ROWS.replace("1.jpg,apple", '1.jpg,"apple').replace(
            "4.jpg,pear", '4.jpg,pear"'
        ),
        refused=r"goes over 4 lines.*ends in line 6",
        remedy=rewrite(HEAD + ROWS),
    ),
    listed(
        "a caption of two lines in another column",
        "path,label,caption\n" + ROWS.replace("\n", ',"a\nb"\n'),
    ),
    listed("backslashes", HEAD + ROWS.replace("/", "\\")),
    listed("no endings in a list", HEAD + ROWS.replace(".jpg", "")),
    listed(
        "a measurement as label",
        HEAD + MEASURES,
        refused=r"5 labels are numbers with a fraction",
        remedy=rewrite(HEAD + ROWS),
    ),
    listed(
        "decimal commas",
        "path;label\n" + "".join(f"images/{n}.jpg;1,{n}\n" for n in range(6)),
        refused="numbers with a fraction",
        remedy=rewrite(HEAD + ROWS),
    ),
    Case("1 and 1.0 in one column", numbered, {"1": 3, "2": 3}, LIST, kind="table"),
    Case("absolute paths", absolute, TWO, LIST, kind="table"),
    listed(
        "no header", ROWS, refused="must name the columns", remedy=rewrite(HEAD + ROWS)
    ),
    listed(
        "other columns",
        "file,dish\n" + ROWS,
        refused=r"no column 'path'. Columns: file, dish",
        remedy=lambda root, keys: [
            keys.update(image_key="file", label_key="dish"),
            write(
                root / "v.csv", "file,dish\nimages/v7.jpg,apple\nimages/v8.jpg,pear\n"
            ),
        ],
    ),
    listed(
        "an empty label",
        HEAD + ROWS + "images/caf\xe9.jpg,\n",
        {**TWO, "": 1},
        refused="has no label.*labels=some",
        remedy=sets(labels="some"),
    ),
    listed(
        "a file that is not there",
        HEAD + ROWS + "images/x.jpg,pear\n",
        refused="'images/x.jpg' is no image",
        remedy=rewrite(HEAD + ROWS),
    ),
    listed(
        "an image in two lists",
        HEAD + ROWS + "images/v7.jpg,apple\n",
        refused="is also in data.train_list",
        remedy=rewrite(HEAD + ROWS),
    ),
    listed(
        "a field too many",
        HEAD + ROWS + "images/0.jpg,apple,1\n",
        refused="line 8 has 3 fields",
        remedy=rewrite(HEAD + ROWS),
    ),
    listed("a quoted comma", HEAD + ROWS.replace("pear", '"pear"')),
    Case(
        "label sets as Roboflow exports them",
        roboflow,
        {"apple": 3, "fig": 3},
        SETS,
        kind="table",
    ),
    listed("labels joined by |", JOINED, {"apple+fig": 3, "pear": 2}, keys=PAIRS),
    listed(
        "labels joined by ;",
        JOINED.replace("|", ";"),
        {"apple+fig": 3, "pear": 2},
        keys=PAIRS,
        refused="data.separator=';'",
        remedy=sets(separator=";"),
    ),
    listed(
        "a 2 among 0 and 1",
        WIDE.replace("5.jpg,0", "5.jpg,2"),
        {"apple": 2, "pear": 3},
        keys=PAIRS,
        refused="line 7 has '2' where 0 or 1",
        remedy=rewrite(WIDE),
    ),
]

# --------------------------------------------------------------------------------
# shards


def tar(path: Path, members: Mapping[str, bytes], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as opened:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            opened.addfile(info, io.BytesIO(data))
    return path


def half(number: int) -> str:
    return "apple" if number < 3 else "pear"


def members(
    name: str = "img_{}", label: Callable[[int], str] = half
) -> dict[str, bytes]:
    pairs = [(name.format(n), photo(n), label(n).encode()) for n in range(6)]
    return {
        f"{key}.{kind}": data
        for key, image, text in pairs
        for kind, data in (("jpg", image), ("cls", text))
    }


def shards(
    train: Mapping[str, bytes], val: Mapping[str, bytes] | None = None, mode: str = "w"
) -> Callable[[Path], object]:
    return lambda root: [
        tar(root / "train.tar", train, mode),
        tar(root / "val.tar", val or members("v_{}")),
    ]


SHARDS_KEYS = {"kind": "webdataset", "train": "ROOT/train.tar", "val": "ROOT/val.tar"}
LISTS = members(label=lambda n: json.dumps(["apple", "fig"] if n % 2 else []))


def sharded(
    name: str,
    make: Callable[[Path], object],
    right: Mapping[str, int] = TWO,
    **fields: Any,
) -> Case:
    return Case(
        name,
        make,
        right,
        {**SHARDS_KEYS, **fields.pop("keys", {})},
        kind="shards",
        **fields,
    )


def cut(root: Path) -> None:
    shards(members())(root)
    write(root / "train.tar", (root / "train.tar").read_bytes()[:4000])


SHARDS = [
    sharded("plain shards", shards(members())),
    sharded("dots in names of shards", shards(members("img_{}.5"))),
    sharded(
        "capital endings in a shard",
        shards({n.replace("jpg", "JPG"): data for n, data in members().items()}),
    ),
    sharded("a readme in a shard", shards({"README.md": b"x", **members()})),
    sharded(
        "masks beside images", shards({**members(), "img_0.seg.png": photo(1, "PNG")})
    ),
    sharded(
        "names with a second part",
        shards({**members(), "img_0.b.jpg": photo(1), "img_0.b.cls": b"pear"}),
        message="2 members are not read: 1 .b.jpg, 1 .b.cls.*first dot",
    ),
    sharded("folders in a shard", shards(members("a/b/img_{}"))),
    sharded(
        "numbers as labels",
        shards(
            members(label=lambda n: str(n // 3)), members("v_{}", lambda n: str(n // 3))
        ),
        {"0": 3, "1": 3},
    ),
    sharded(
        "label sets in a shard",
        shards(LISTS, {n.replace("img", "v"): d for n, d in LISTS.items()}),
        {"": 3, "apple+fig": 3},
        refused="label.*is",
        remedy=sets(label_sets=True),
    ),
    sharded(
        "a cut shard",
        cut,
        refused="cannot be read|cut short or damaged",
        remedy=lambda root, keys: shards(members())(root),
    ),
    sharded(
        "a compressed shard",
        shards(members(), mode="w:gz"),
        refused="cannot be read.*uncompressed",
        remedy=lambda root, keys: shards(members())(root),
    ),
    sharded(
        "an image without a label",
        shards({**members(), "x.jpg": photo(9)}),
        {**TWO, "": 1},
        refused="'x' of the shard .* has no label",
        remedy=sets(labels="some"),
    ),
    sharded(
        "a fraction in a shard",
        shards(members(label=lambda n: str(n / 4))),
        refused="numbers with a fraction",
        remedy=lambda root, keys: shards(members())(root),
    ),
]

# --------------------------------------------------------------------------------
# parquet


def parquet(labels: list[Any], **further: list[Any]) -> Callable[[Path], object]:
    """A table that Hugging Face did not write: a struct of bytes and path, without a
    note of what it is.
    """

    def make(root: Path) -> None:
        import pyarrow
        import pyarrow.parquet as files

        for split, names in (("train", range(6)), ("validation", range(6, 12))):
            images = [{"bytes": photo(n), "path": f"{n}.jpg"} for n in names]
            columns = {
                "image": images,
                **({"label": labels} if labels else {}),
                **further,
            }
            files.write_table(pyarrow.table(columns), root / f"{split}.parquet")

    return make


HF = {"kind": "hf", "path": "ROOT", "label_key": "label"}
PARQUET = [
    Case(
        "parquet of another writer",
        parquet(["apple"] * 3 + ["pear"] * 3),
        TWO,
        HF,
        kind="parquet",
    ),
    Case(
        "true and false as labels",
        parquet([False] * 3 + [True] * 3),
        {"False": 3, "True": 3},
        HF,
        kind="parquet",
    ),
    Case(
        "whole numbers with a point",
        parquet([0.0] * 3 + [1.0] * 3),
        {"0": 3, "1": 3},
        HF,
        kind="parquet",
    ),
    Case(
        "a fraction in parquet",
        parquet([0.5] * 3 + [1.0] * 3, dish=["apple"] * 3 + ["pear"] * 3),
        TWO,
        HF,
        refused="numbers with a fraction.*Choose the column",
        remedy=sets(label_key="dish"),
        kind="parquet",
    ),
    Case(
        "a column a class",
        parquet([], apple=[1, 0] * 3, fig=[1, 1, 0] * 2),
        {"apple+fig": 2, "fig": 2, "apple": 1, "": 1},
        {**HF, "label_key": "", "label_keys": ["apple", "fig"]},
        kind="parquet",
    ),
]

CASES = [*FOLDERS, *TABLES, *SHARDS, *PARQUET]
