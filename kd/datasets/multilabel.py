"""Images with several labels each, or none: a folder of images, and a CSV or JSON file that names their labels.

CSV with two columns: `file,labels`, the labels joined by `|`. CSV with more: `file,CLASS,CLASS,...`, each cell 0 or 1.
JSON: `{"a.jpg": ["rice", "egg"], "b.jpg": []}`. The first line of a CSV names its columns, whatever the names.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np

from kd.datasets._decode import first_few, hold_out
from kd.datasets._folder import File, ImageFolder, check_root, scan
from kd.errors import DataError, did_you_mean
from kd.types import DatasetFacts, file_key

Sets = dict[str, "set[str] | None"]
"""The labels of each file; None: it is not labelled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Where images and labels lie."""

    root: str = file_key()
    """Folder of the images."""
    train_labels: str = file_key(within="root")
    """CSV or JSON file with the labels of the training images: absolute, or relative to `root`."""
    val_labels: str = file_key("", within="root")
    """The same of the validation images. Empty: `val_fraction` of the training file."""
    val_fraction: float = 0.0
    """Share of the images held out for validation, chosen by a hash of the path, where there is no `val_labels`."""
    separator: str = "|"
    """Between two labels in a CSV of two columns."""
    ending: str = ""
    """Appended to each name, such as .jpg, where the file leaves it out."""

    def __post_init__(self) -> None:
        if not self.root or not self.train_labels:
            raise ValueError("root and train_labels must be set: the folder of the images, and the file of the labels")
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"val_fraction is {self.val_fraction}; it must be at least 0 and below 1")
        if bool(self.val_labels) == bool(self.val_fraction):
            raise ValueError("val_labels or val_fraction is needed; set one of them")
        if not self.separator:
            raise ValueError("separator is empty; it must be what stands between two labels")


def facts(options: Options) -> DatasetFacts:
    """Return what others must know of it."""
    return DatasetFacts(label="set", root=options.root)


def build(options: Options, split: str, classes: Sequence[str] | None, labels: str = "all") -> ImageFolder:
    """List the images of a split.

    Raises:
        DataError: no such folder or file, an image that is not there, a class that training does not know.
    """
    root = os.path.expanduser(options.root)
    check_root(root)
    key = "val_labels" if split == "val" and options.val_labels else "train_labels"
    where, path = f"data.{key}", os.path.join(root, os.path.expanduser(getattr(options, key)))
    labels_of, header = _read(path, where, options)
    if key == "val_labels":
        _check_apart(options, root, labels_of)
    own = header or sorted(set().union(*(labels or () for labels in labels_of.values())))
    order = tuple(own if classes is None else classes)
    names = sorted(map(os.fsencode, labels_of))
    files = _files(root, names, where)
    if options.val_fraction and names:
        keep = np.flatnonzero(hold_out(names, np.zeros(len(names), np.int64), options.val_fraction) == (split == "val"))
        names, files = [names[id] for id in keep], [files[id] for id in keep]
    if not names:
        raise DataError(where, f"the split '{split}' has no images", "At least one", "Name more in the file")
    if labels == "none":
        return ImageFolder(root, names, files, np.full(len(names), -1, np.int32), ())
    sets = [labels_of[os.fsdecode(name)] for name in names]
    return ImageFolder(root, names, files, _table(sets, names, order, where, labels), order)


def _table(
    sets: Sequence[set[str] | None], names: Sequence[bytes], order: Sequence[str], where: str, labels: str
) -> np.ndarray:
    """Return the sets as int8 [N, C]: 1 and 0; -1 for an image that is not labelled."""
    position, table = {name: i for i, name in enumerate(order)}, np.zeros((len(sets), len(order)), np.int8)
    for row, (labels_of, name) in enumerate(zip(sets, names, strict=True)):
        if labels_of is None:
            if labels == "all":
                wrong = f"'{os.fsdecode(name)}' has no entry (an empty list would say that it shows no class)"
                raise DataError(where, wrong, "Labels for each image", "Add them, or set data.labels=some")
            table[row] = -1
            continue
        unknown = sorted(labels_of - position.keys())
        if unknown:
            wrong = f"'{os.fsdecode(name)}' has the label '{unknown[0]}', which no training image has"
            raise DataError(
                where, wrong, f"Allowed: {first_few(order)}", did_you_mean(unknown[0], order) or "Rename it"
            )
        table[row, [position[label] for label in labels_of]] = 1
    return table


def _files(root: str, names: Sequence[bytes], where: str) -> list[File]:
    """Return what the listing says about the files.

    Raises:
        DataError: one is not there, or is no image by its name.
    """
    files = scan(root, b"")
    missing = [name for name in names if name not in files]
    if missing:
        first = os.fsdecode(missing[0])
        near = did_you_mean(first, map(os.fsdecode, files)) if len(files) < 10_000 else ""  # slow on many
        wrong = f"{len(missing)} of {len(names)} names are no image in '{root}', the first '{first}'"
        raise DataError(where, wrong, "Paths of images in data.root", near or "Correct them, or set data.ending=.jpg")
    return [files[name] for name in names]


def _check_apart(options: Options, root: str, val: Collection[str]) -> None:
    # Validation on training images measures memory; nothing later in the run would show it.
    train = _read(os.path.join(root, os.path.expanduser(options.train_labels)), "data.train_labels", options)[0]
    both = sorted(train.keys() & set(val))
    if both:
        wrong = f"'{both[0]}' is also in data.train_labels, with {len(both) - 1} more"
        raise DataError("data.val_labels", wrong, "An image is in one of the files", "Remove it from one of them")


# -------------------------------------------------------------------------------------------------------- the file


def _read(path: str, where: str, options: Options) -> tuple[Sets, list[str]]:
    """Return the labels of each file, and the classes in order where the file lists them.

    Raises:
        DataError: it cannot be read, or is no such file.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as opened:
            sets, order = _csv(opened, options) if path.endswith(".csv") else (_json(opened), [])
    except OSError as error:
        raise DataError(where, f"'{path}' cannot be read ({error.strerror})", "A CSV or JSON file", "") from error
    except (ValueError, csv.Error) as error:
        allowed = "CSV `file,labels` or `file,CLASS,...` of 0 and 1; JSON {file: [labels]}"
        raise DataError(where, f"'{path}': {error}", allowed, "Correct the file") from error
    return {os.path.normpath(name + options.ending): labels for name, labels in sets.items()}, order


def _csv(opened: Iterable[str], options: Options) -> tuple[Sets, list[str]]:
    rows = [(number, row) for number, row in enumerate(csv.reader(opened), 1) if row]
    header = rows[0][1] if rows else []
    if len(header) < 2:
        raise ValueError("its first line does not name two columns or more")
    sets: Sets = {}
    for number, row in rows[1:]:
        if len(row) != len(header):
            raise ValueError(f"line {number} has {len(row)} fields, the first line has {len(header)}")
        if row[0] in sets:
            raise ValueError(f"line {number} names '{row[0]}' a second time")
        sets[row[0]] = _cells(row[1:], header[1:], number, options.separator)
    return sets, header[1:] if len(header) > 2 else []


def _cells(cells: Sequence[str], classes: Sequence[str], number: int, separator: str) -> set[str] | None:
    """Return the labels of a line; None where its cells are empty."""
    if not any(cell.strip() for cell in cells):
        return None if len(cells) > 1 else set()
    if len(cells) == 1:
        return {label.strip() for label in cells[0].split(separator)} - {""}
    wrong = next((cell for cell in cells if cell.strip() not in ("0", "1", "0.0", "1.0")), None)
    if wrong is not None:
        raise ValueError(f"line {number} has '{wrong}' where 0 or 1 is expected")
    return {name for name, cell in zip(classes, cells, strict=True) if float(cell)}


def _json(opened: IO[str]) -> Sets:
    content = json.load(opened)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}")
    for name, labels in content.items():
        if labels is not None and not (isinstance(labels, list) and all(isinstance(one, str) for one in labels)):
            raise ValueError(f"'{name}' has no list of names")
    return {name: None if labels is None else set(labels) for name, labels in content.items()}
