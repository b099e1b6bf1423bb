"""Images named in files with their labels: shared by `csv` and `multilabel`."""

import csv
import os
import posixpath
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TextIO

import numpy as np

from kd.core.errors import DataError, did_you_mean
from kd.parts.datasets._decode import READ_BY, part
from kd.parts.datasets._folder import ENDINGS, File, entries_of, file_of, is_folder, is_image, text

DELIMITERS = {".csv": ",", ".tsv": "\t"}
SLOW = 10_000  # names in a folder from which on none is proposed for one that is not there


class Entry(NamedTuple):
    name: str  # as written: a path in data.root or an absolute one below it, with its ending or without
    label: Any  # whatever the reader of the list makes of it
    line: int = 0  # 0: the list has no lines

    def __str__(self) -> str:
        return f"line {self.line}: '{self.name}'" if self.line else f"'{self.name}'"


class Listed(NamedTuple):
    entry: Entry
    file: File


class Lists:
    """The lists of options whose keys are `train_ENDING`, `val_ENDING` and `test_ENDING`."""

    # They are absolute, or relative to `root`; without one of val, `val_fraction` of the training list is held out.

    def __init__(self, options: Any, ending: str) -> None:
        self.keys = {split: f"{split}_{ending}" for split in ("train", "val", "test")}
        self.files = {split: getattr(options, key) for split, key in self.keys.items()}
        self.root, self.val_fraction = options.root, options.val_fraction
        if not self.root or not self.files["train"]:
            wrong = f"root and {self.keys['train']} must be set: the folder of the images, and the file that lists them"
            raise ValueError(wrong)
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"val_fraction is {self.val_fraction}; it must be at least 0 and below 1")
        if bool(self.files["val"]) == bool(self.val_fraction):
            raise ValueError(f"{self.keys['val']} or val_fraction is needed; set one of them")

    def key(self, split: str) -> str:  # the config path of the list that has the images of a split
        return f"data.{self.keys[split if self.files[split] else 'train']}"

    def open(self, split: str, read: Callable[[str, str], Iterable[Entry]]) -> tuple[dict[bytes, Listed], list[str]]:
        """Return the images of the list of a split by their paths in `root`, and what is left out."""
        # `read` is of a file and its config path.
        root, folders = os.path.expanduser(self.root), dict[bytes, _Beside]()

        def located(split: str) -> dict[bytes, Listed]:
            key = self.key(split)
            return _locate(root, folders, read(os.path.join(root, os.path.expanduser(self.files[split])), key), key)

        lists = [name for name in self.keys if self.files[name]]
        listed = split if split in lists else "train"
        own = located(listed)
        others = {name: located(name) for name in lists[: lists.index(listed)]}
        # Validation on training images measures memory; nothing later in the run would show it.
        for name, other in others.items():
            if both := sorted(own.keys() & other.keys()):
                first, more = both[0], len(both) - 1
                wrong = f"{own[first].entry} is also in {self.key(name)}, {other[first].entry}, with {more} more"
                raise DataError(self.key(split), wrong, "An image is in one of the lists", "Remove it from one of them")
        if listed != lists[-1]:
            return own, []  # some of the lists alone say nothing of the others
        beside = (posixpath.join(folder, name) for folder, one in folders.items() for name in one.images)
        unlisted = sum(all(name not in one for one in (own, *others.values())) for name in beside)
        return own, [f"{unlisted} images beside the listed ones are in no list"] if unlisted else []

    def held(self, names: Sequence[bytes], labels: np.ndarray, split: str) -> np.ndarray:
        """Return the positions of the images of a split among those of its list, by `val_fraction` of each class."""
        if not self.val_fraction or split == "test":
            return np.arange(len(names))
        return part(names, labels, self.val_fraction, split)


def content(path: str, where: str, endings: Sequence[str], form: str, read: Callable[[TextIO], Any]) -> Any:
    """Return what `read` makes of a text file with one of these endings; ValueError: that is not `form`."""
    if not path.lower().endswith(tuple(endings)):
        raise DataError(where, f"is '{path}'", f"A file that ends in {', '.join(endings)}", "Write it as one of them")
    try:
        with open(path, newline="", encoding="utf-8-sig") as opened:
            return read(opened)
    except OSError as error:
        wrong, allowed = f"'{path}' cannot be read ({error.strerror})", "A path, absolute or relative to data.root"
        raise DataError(where, wrong, allowed, "Check the path") from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise DataError(where, f"'{path}': {error}", form, "Correct the file") from error


def table(opened: TextIO) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the names of the columns, and the lines of a table by number."""
    # ValueError: no two columns, one without a name or named twice, or a line of another length.
    reader = csv.reader(opened, delimiter=DELIMITERS[os.path.splitext(opened.name)[1].lower()])
    header = [name.strip() for name in next((row for row in reader if row), [])]
    if len(header) < 2:
        wrong = "its first line does not name two columns or more"
        raise ValueError(wrong + (f": it is '{header[0]}'" if header else ""))
    if "" in header[1:]:
        raise ValueError("a column has no name")
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        raise ValueError(f"its first line names '{twice[0]}' twice")
    if os.fsencode(header[0].lower()).endswith(ENDINGS):
        raise ValueError(f"its first line is an image, '{header[0]}'; it must name the columns")

    def rows() -> Iterator[tuple[int, list[str]]]:
        for row in filter(None, reader):
            if len(row) != len(header):
                raise ValueError(f"line {reader.line_num} has {len(row)} fields, the first line has {len(header)}")
            yield reader.line_num, row

    return header, rows()


class _Beside:
    def __init__(self, path: bytes) -> None:
        entries = entries_of(path)[0] if os.path.isdir(path) else []
        self.entries = {entry.name: entry for entry in entries if not is_folder(entry)}
        self.images = {name for name, entry in self.entries.items() if is_image(entry)}

    @cached_property
    def stems(self) -> dict[bytes, list[bytes]]:
        """Images by their names without the ending; made where a list lacks endings."""
        stems: dict[bytes, list[bytes]] = {}
        for name in self.images:
            stems.setdefault(posixpath.splitext(name)[0], []).append(name)
        return stems


def _locate(root: str, folders: dict[bytes, _Beside], entries: Iterable[Entry], where: str) -> dict[bytes, Listed]:
    """Return the entries by the paths of their files in `root`, sorted; a folder is listed once."""
    found: dict[bytes, Listed] = {}
    missing: list[tuple[Entry, bytes]] = []
    roots = [f"{path.rstrip('/')}/" for path in (os.path.abspath(root), os.path.realpath(root))]
    for entry in entries:
        name = _relative(roots, entry, where)
        folder, base = posixpath.split(name)
        if folder not in folders:
            folders[folder] = _Beside(os.path.join(os.fsencode(root), folder))
        beside = folders[folder]
        matches = [base] if base in beside.entries else beside.stems.get(base, [])
        if len(matches) > 1:
            both = ", ".join(text(posixpath.join(folder, one)) for one in sorted(matches))
            raise DataError(where, f"{entry} is more than one image: {both}", "", "Write the ending")
        if not matches:
            missing.append((entry, name))
            continue
        ending = "" if matches[0] in beside.images else text(posixpath.splitext(matches[0])[1]).lower()
        if ending in READ_BY:
            raise DataError(where, f"{entry} cannot be read here", READ_BY[ending], "Convert it, or install that")
        path = posixpath.join(folder, matches[0])
        if path in found:
            first = found[path].entry
            raise DataError(where, f"{entry} is the image of {first}", "Each image once", "Remove one of them")
        found[path] = Listed(entry, file_of(beside.entries[matches[0]]))
    if missing:
        entry, name = missing[0]
        beside = folders[posixpath.dirname(name)]
        names = [*beside.stems, *beside.images]
        near = did_you_mean(text(posixpath.basename(name)), map(text, names)) if len(names) < SLOW else ""
        wrong = f"{entry} is no image in '{root}'; {len(missing)} of {len(found) + len(missing)} names are none"
        raise DataError(where, wrong, "Paths of images in data.root, ending optional", near or "Correct the names")
    return {path: found[path] for path in sorted(found)}  # by bytes: the same on every machine, whatever its locale


def _relative(roots: Sequence[str], entry: Entry, where: str) -> bytes:
    """Return the normalized path in the root that an entry names; `roots` are ways to write that folder."""
    name = posixpath.normpath(entry.name.strip())
    if name.startswith("/"):
        name = next((name.removeprefix(one) for one in roots if name.startswith(one)), "..")
    if f"{name}/".startswith("../"):
        wrong, remedy = f"{entry} does not lie in '{roots[0]}'", "Set data.root to a folder that holds all images"
        raise DataError(where, wrong, "Paths in data.root, relative or absolute", remedy)
    return os.fsencode(name)
