"""What a folder of images holds: its layout as keys of `data`, its labels, and a sample of decoded images."""

import csv
import json
import os
import posixpath
import random
import re
import time
from collections import Counter
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

from kd.core.errors import CorruptImage, DataError
from kd.files.tables import DELIMITERS, read_text, table
from kd.parts import registry
from kd.setup.data import Data, DataPlan, open_sources

SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev"),
    "test": ("test", "testing", "eval"),
}
"""What people call splits, the usual name first."""
LABEL_COLUMNS = ("label", "class", "category", "species", "target")
HELD_OUT = {"val_fraction": 0.1}  # where nothing is named like a validation split
SAMPLE, SECONDS = 200, 2.5  # images that are decoded at most, and for how long: an answer within ten seconds in all
NO_TABLE = (ValueError, LookupError, AttributeError, StopIteration, NotImplementedError, csv.Error)  # when one is read
MOST_ROOTS = 20  # inner folders in which the images of a table are looked for
Keys = dict[str, Any]  # of a section, `kind` first


class Folder(NamedTuple):
    """What was found."""

    keys: Keys
    labels: str  # `data.labels`
    why: str  # images have no labels
    data: Data
    counts: list[int]  # training images of each class; empty without labels
    side: int  # the median of the shorter sides of `sampled` images that were decoded, pixels
    sampled: int
    damaged: int  # images of the sample that cannot be decoded
    bits: int  # that the sampled images of 16 bits a channel use; 0: there are none
    endings: str


def look(folder: Path) -> Folder:
    """Find the layout of a folder, list its images, and decode a sample of them."""
    if not folder.is_dir():
        wrong = f"'{folder}' " + ("is a file" if folder.exists() else "does not exist")
        raise DataError("FOLDER", wrong, "A folder of images", "Unpack the archive, or check the path")
    try:
        inner = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
        keys = _tables(folder, inner) or _class_folders(folder, inner)
        labels, why, data = _opened(**keys)
        known = data.labels()
        counts = (known > 0).sum(0) if known.ndim == 2 else known[known >= 0].bincount()
        return Folder(keys, labels, why, data, counts.tolist(), *_sampled(data))
    except OSError as error:
        wrong = f"'{error.filename}' cannot be read ({error.strerror})"
        raise DataError("FOLDER", wrong, "", "Check its rights") from error
    except DataError as error:
        raise DataError("FOLDER", error.wrong, error.allowed, error.remedy) from error


def _class_folders(folder: Path, inner: list[str]) -> Keys:
    while len(inner) == 1 and (below := [one.name for one in (folder / inner[0]).iterdir() if one.is_dir()]):
        folder, inner = folder / inner[0], below  # one folder around all others, as archives have it
    there = {name.lower(): name for name in inner}
    found = {split: there[one] for split, names in SPLITS.items() for one in reversed(names) if one in there}
    if "train" not in found or len(found) == 1:
        return {"kind": "imagefolder", "root": str(folder / found.get("train", "")), **HELD_OUT}
    keys = {f"{split}_split": name for split, name in found.items() if split == "test" or name != split}
    return {"kind": "imagefolder", "root": str(folder), **({} if "val" in found else HELD_OUT), **keys}


def _tables(folder: Path, inner: list[str]) -> Keys | None:
    """Return the keys of tables beside images, if the first line of the one of training names an image."""
    tables: dict[str, Path] = {}
    splits = [name for name in inner if any(name.lower() in names for names in SPLITS.values())]
    inside = [file for name in splits for file in (folder / name).glob("*.csv")]  # as Roboflow exports them
    for path in [*sorted(inside), *sorted(folder.iterdir(), reverse=True)]:
        words = {*re.split("[^a-z]+", (path.stem if path.parent == folder else path.parent.name).lower())}
        if path.suffix in (".csv", ".tsv", ".json"):
            tables[next((split for split, names in SPLITS.items() if words & {*names}), "")] = path
    first = tables.get("train") or tables.get("")
    for root in [folder, *(folder / name for name in inner[:MOST_ROOTS])] if first else []:
        with suppress(*NO_TABLE):
            assert first
            kind, more = _table(first, root if first.parent == folder else first.parent)
            ending = "labels" if kind == "multilabel" else "list"
            lists = {
                split: os.path.relpath({**tables, "train": first}[split], root) for split in ("train", *tables) if split
            }
            named = {f"{split}_{ending}": path for split, path in lists.items()}
            return {"kind": kind, "root": str(root), **named, **({} if "val" in tables else HELD_OUT), **more}
    return None


def _table(path: Path, root: Path) -> tuple[str, Keys]:
    """Return kind and keys of a table of images in `root`; one that is none raises what `_tables` expects."""

    def is_image(name: str) -> bool:
        return 0 < len(name) < 200 and ((root / name).is_file() or any(root.glob(f"{escape(name)}.*")))

    if path.suffix == ".json":
        name, labels = next(iter(json.loads(path.read_text(encoding="utf-8")).items()))
        return {True: "multilabel"}[isinstance(labels, list) and is_image(name)], {}
    header, lines = table(read_text(path), DELIMITERS[path.suffix])
    rows = [row for _, row in lines]
    image = next(i for i, cell in enumerate(rows[0]) if is_image(cell.strip()))
    others = [i for i in range(len(header)) if i != image]
    if image == 0 and len(others) > 1 and {cell.strip() for row in rows for cell in row[1:]} <= {"0", "1", ""}:
        return "multilabel", {}
    label = others[0] if len(others) == 1 else next(i for i in others if header[i].strip().lower() in LABEL_COLUMNS)
    joined = Counter(sign for row in rows for sign in "|;" if sign in row[label])
    if joined and image == 0 and len(others) == 1:
        return "multilabel", {"separator": joined.most_common(1)[0][0]}
    return "csv", {"image_key": header[image].strip(), "label_key": header[label].strip()}


def _opened(kind: str, **keys: Any) -> tuple[str, str, Data]:
    """Open the splits, without labels where there are no two class folders; return `data.labels`, why, and the data."""
    options = registry.default_options("datasets", kind, **keys)
    try:
        data = open_sources(DataPlan(kind=kind, options=options))
    except DataError as error:
        if kind != "imagefolder":
            raise
        data = open_sources(DataPlan(kind=kind, options=options, labels="none"))
        if len({posixpath.dirname(data.train.name(id)) for id in range(len(data.train))}) > 1:
            raise error from None
        return "none", error.wrong, data
    if getattr(options, "unlabelled", None) not in data.classes:
        return "all", "", data
    return "some", "", open_sources(DataPlan(kind=kind, options=options, labels="some"))


def _sampled(data: Data) -> tuple[int, int, int, int, str]:
    """Decode training images in random order; return `side`, `sampled`, `damaged`, `bits` and `endings` of `Folder`."""
    train, end = data.train, time.monotonic() + SECONDS
    sides, damaged, endings, bits = list[int](), list[str](), Counter[str](), 0
    for id in random.Random(0).sample(range(len(train)), min(SAMPLE, len(train))):
        endings[posixpath.splitext(train.name(id))[1].lower().removeprefix(".") or "nameless"] += 1
        try:
            decoded = train.decode(id)
            sides.append(min(decoded.image.size))
            bits = max(bits, decoded.used)
        except CorruptImage as error:
            damaged.append(error.wrong)
        if time.monotonic() > end:
            break
    if not sides:
        wrong = f"none of {len(damaged)} sampled images can be decoded; {damaged[0]}"
        raise DataError("FOLDER", wrong, "Whole images in formats that kd reads", "Replace them")
    return sorted(sides)[len(sides) // 2], len(sides), len(damaged), bits, " and ".join(endings)
