"""Shared by `csv` and `multilabel`: images named with their labels in files."""

import csv
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from kd.core.errors import DataError, did_you_mean
from kd.core.text import nfc
from kd.files import tables
from kd.files.folders import (
    ENDINGS,
    READ_BY,
    entries_of,
    folders,
    is_folder,
    is_image,
    printable,
)
from kd.parts.datasets._files import Files, size_and_stamp
from kd.parts.datasets._source import LabelColumn, Listed, SplitRequest, source

WHERE = Files.config_path

SLOW = 10_000  # folder size from which no similar name is proposed for a missing one


class Entry(NamedTuple):
    # name as written: a path in data.root or an absolute one below it, with or without
    # ending
    name: str
    label: Any  # value from the reader of the list
    line: int = 0  # line number; 0: the list has no lines
    group: str = ""  # cell of the column `data.group`

    def __str__(self) -> str:
        return f"line {self.line}: '{self.name}'" if self.line else f"'{self.name}'"


class Located(NamedTuple):
    """A line of a list, and the file that it names."""

    entry: Entry
    size: int  # see `size_and_stamp`
    stamp: int


class Lists:
    """The lists of options whose keys are `train_ENDING`, `val_ENDING` and
    `test_ENDING`.
    """

    # Paths are absolute, or relative to `root`; without a list for val, `val_fraction`
    # of the training list is held out.

    def __init__(self, options: Any, ending: str) -> None:
        self.keys = {split: f"{split}_{ending}" for split in ("train", "val", "test")}
        self.files = {split: getattr(options, key) for split, key in self.keys.items()}
        self.options, self.root = options, options.root
        if not self.root or not self.files["train"]:
            wrong = (
                f"root and {self.keys['train']} must be set: the folder of the images,"
                " and the file that lists them"
            )
            raise ValueError(wrong)
        if bool(self.files["val"]) == bool(options.val_fraction):
            raise ValueError(
                f"{self.keys['val']} or val_fraction is needed; set one of them"
            )

    def key(
        self, split: str
    ) -> str:  # config path of the list with the images of a split
        return f"data.{self.keys[split if self.files[split] else 'train']}"

    def open(
        self, split: str, read: Callable[[str, str], Iterable[Entry]]
    ) -> tuple[dict[bytes, Located], list[str]]:
        """Return the images in the list of a split by their paths in `root`, and notes
        on omitted ones.
        """
        # `read`: (file, its config path) -> entries.
        root, notes = os.path.expanduser(self.root), list[str]()
        finder = _Finder(root)

        def located(split: str) -> dict[bytes, Located]:
            key = self.key(split)
            file = os.path.join(root, os.path.expanduser(self.files[split]))
            found, merged = finder.locate(
                read(file, key), key, os.path.relpath(os.path.dirname(file), root)
            )
            if merged and split == listed:
                notes.append(
                    f"{merged} lines of {key} repeat another with the same label, and"
                    " count once"
                )
            return found

        lists = [name for name in self.keys if self.files[name]]
        listed = split if split in lists else "train"
        own = located(listed)
        others = {name: located(name) for name in lists[: lists.index(listed)]}
        # Validation on training images would measure memorization, and nothing later
        # would reveal it.
        for name, other in others.items():
            if both := sorted(own.keys() & other.keys()):
                first, more = both[0], len(both) - 1
                wrong = (
                    f"{own[first].entry} is also in {self.key(name)},"
                    f" {other[first].entry}, with {more} more"
                )
                raise DataError(
                    self.key(split),
                    wrong,
                    "An image is in one of the lists",
                    "Remove it from one of them",
                )
        if listed != lists[-1]:
            return own, notes  # only if all lists are known
        beside = (
            posixpath.join(folder, name)
            for folder, one in finder.folders.items()
            for name in one.images
        )
        unlisted = sum(
            all(name not in one for one in (own, *others.values())) for name in beside
        )
        return own, [
            *notes,
            *[f"{unlisted} images beside the listed ones are in no list"]
            * bool(unlisted),
        ]

    def source(
        self,
        root: str,
        listed: Mapping[bytes, Located],
        labels: LabelColumn,
        request: SplitRequest,
        notes: Sequence[str],
    ) -> Listed:
        """Return the located images of a split with their labels; see
        `kd.parts.datasets._source.source`.
        """
        files = Files(
            root,
            ((path, image.size, image.stamp) for path, image in listed.items()),
            *notes,
        )
        entries = [image.entry for image in listed.values()]
        request = request._replace(
            fraction=self.options.val_fraction, group=self.options.group
        )
        groups = (
            entry.group or printable(path)
            for entry, path in zip(entries, listed, strict=True)
        )
        return source(
            files,
            labels._replace(subject=lambda row: str(entries[row])),
            request,
            groups,
        )


def content(
    path: str,
    config_path: str,
    endings: Sequence[str],
    form: str,
    read: Callable[[str], Any],
) -> Any:
    """Read a text file with one of these endings by `read`; a ValueError means that its
    content is not `form`.
    """
    if not path.lower().endswith(tuple(endings)):
        raise DataError(
            config_path,
            f"is '{path}'",
            f"A file that ends in {', '.join(endings)}",
            "Write it as one of them",
        )
    try:
        return read(tables.read_text(path))
    except OSError as error:
        wrong, allowed = (
            f"'{path}' cannot be read ({error.strerror})",
            "A path, absolute or relative to data.root",
        )
        raise DataError(config_path, wrong, allowed, "Check the path") from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise DataError(
            config_path, f"'{path}': {error}", form, "Correct the file"
        ) from error


def table(content: str, path: str) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the names of the columns, and the lines of a table by number; see
    `kd.files.tables.parse_table`.
    """
    header, rows = tables.parse_table(
        content, tables.DELIMITERS[os.path.splitext(path)[1].lower()]
    )
    if os.fsencode(header[0].lower()).endswith(ENDINGS):
        raise ValueError(
            f"its first line is an image, '{header[0]}'; it must name the columns"
        )
    return header, rows


class _Beside:
    def __init__(self, path: bytes) -> None:
        entries = entries_of(path, WHERE)[0] if os.path.isdir(path) else []
        files = [entry for entry in entries if not is_folder(entry)]
        self.names = {entry.name for entry in files}
        self.images = {entry.name for entry in files if is_image(entry)}

    def named(self, base: bytes) -> list[bytes]:
        """Return the files of a name: as written, or without an image's ending, or in
        another Unicode form.
        """
        return (
            [base]
            if base in self.names
            else self.stems.get(base) or self.forms.get(_form(base), [])
        )

    @cached_property
    def stems(self) -> dict[bytes, list[bytes]]:
        """Images by their names without the ending; built if a list lacks endings."""
        stems: dict[bytes, list[bytes]] = {}
        for name in self.images:
            stems.setdefault(posixpath.splitext(name)[0], []).append(name)
        return stems

    @cached_property
    def forms(self) -> dict[bytes, list[bytes]]:
        """Files and stems by the normalized form of their names; built if a name is not
        found as written.
        """
        forms: dict[bytes, list[bytes]] = {}
        for name, of in [*((name, [name]) for name in self.names), *self.stems.items()]:
            forms.setdefault(_form(name), []).extend(of)
        return forms


def _form(name: bytes) -> bytes:
    return os.fsencode(nfc(os.fsdecode(name)))


class _Finder:
    """Finds the files that lists name; each folder is listed once."""

    def __init__(self, root: str) -> None:
        self.root, self.top, self.folders = (
            root,
            os.fsencode(root),
            dict[bytes, _Beside](),
        )
        self.roots = [
            f"{path.rstrip('/')}/"
            for path in (os.path.abspath(root), os.path.realpath(root))
        ]

    def locate(
        self, entries: Iterable[Entry], config_path: str, table: str
    ) -> tuple[dict[bytes, Located], int]:
        """Return entries by the paths of their files in `root`, sorted, and the number
        of repeated ones.

        A name is a path in `root`, else one beside the list, in the folder `table`
        below `root`.
        """
        found: dict[bytes, Located] = {}
        missing, merged = list[Entry](), 0
        for entry in entries:
            path = self._path(entry, config_path, table)
            if path is None:
                missing.append(entry)
            elif path not in found:
                found[path] = Located(
                    entry, *size_and_stamp(os.path.join(self.top, path))
                )
            elif found[path].entry.label == entry.label:
                merged += 1
            else:
                first = found[path].entry
                wrong = f"{entry} is the image of {first}, with another label"
                raise DataError(
                    config_path, wrong, "One label for each image", "Remove one of them"
                )
        if missing:
            raise self._missing(missing, len(found), config_path)
        return {
            path: found[path] for path in sorted(found)
        }, merged  # by bytes: the same in every locale

    def _path(self, entry: Entry, config_path: str, table: str) -> bytes | None:
        written = [
            entry.name,
            *[entry.name.replace("\\", "/")] * ("\\" in entry.name),
        ]  # "/": as Windows writes them
        ways = [
            *written,
            *(
                posixpath.join(table, name)
                for name in written
                if not table.startswith("..")
            ),
        ]
        for way in ways:
            folder, base = posixpath.split(
                _relative(self.roots, entry._replace(name=way), config_path)
            )
            folder = self._folder(folder)
            matches = self.folders[folder].named(base)
            if len(matches) > 1:
                both = ", ".join(
                    printable(posixpath.join(folder, one)) for one in sorted(matches)
                )
                raise DataError(
                    config_path,
                    f"{entry} is more than one image: {both}",
                    "",
                    "Write the ending",
                )
            if matches:
                ending = printable(posixpath.splitext(matches[0])[1]).lower()
                if matches[0] not in self.folders[folder].images and ending in READ_BY:
                    remedy = "Convert it, or install that"
                    raise DataError(
                        config_path,
                        f"{entry} cannot be read here",
                        READ_BY[ending],
                        remedy,
                    )
                return posixpath.join(folder, matches[0])
        return None

    def _folder(self, folder: bytes) -> bytes:
        """List a folder, and return its path in `root` in the form on disk."""
        if folder in self.folders:
            return folder
        path = os.path.join(os.fsencode(self.root), folder)
        if folder and not os.path.isdir(path) and not folder.isascii():
            above = self._folder(posixpath.dirname(folder))
            there = map(
                os.fsencode, folders(os.path.join(self.root, os.fsdecode(above)))
            )
            same = [
                name
                for name in there
                if _form(name) == _form(posixpath.basename(folder))
            ]
            if same and posixpath.join(above, same[0]) != folder:
                return self._folder(posixpath.join(above, same[0]))
        self.folders[folder] = _Beside(path)
        return folder

    def _missing(
        self, missing: Sequence[Entry], found: int, config_path: str
    ) -> DataError:
        name = _relative(self.roots, missing[0], config_path)
        beside = self.folders[self._folder(posixpath.dirname(name))]
        names = [*beside.stems, *beside.images]
        near = (
            did_you_mean(printable(posixpath.basename(name)), map(printable, names))
            if len(names) < SLOW
            else ""
        )
        wrong = (
            f"{missing[0]} is no image in '{self.root}'; {len(missing)} of"
            f" {found + len(missing)} names are missing"
        )
        return DataError(
            config_path,
            wrong,
            "Paths of images in data.root, ending optional",
            near or "Correct the names",
        )


def _relative(roots: Sequence[str], entry: Entry, config_path: str) -> bytes:
    """Return an entry's normalized path in the root; `roots` are spellings of that
    folder.
    """
    name = posixpath.normpath(entry.name.strip())
    if name.startswith("/"):
        name = next(
            (name.removeprefix(one) for one in roots if name.startswith(one)), ".."
        )
    if f"{name}/".startswith("../"):
        wrong, remedy = (
            f"{entry} does not lie in '{roots[0]}'",
            "Set data.root to a folder that holds all images",
        )
        raise DataError(
            config_path, wrong, "Paths in data.root, relative or absolute", remedy
        )
    return os.fsencode(name)
