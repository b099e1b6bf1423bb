"""Read images that files name with their labels, for `csv` and `multilabel`."""

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
from kd.parts.datasets._source import ImageSource, LabelColumn, SplitRequest, source

WHERE = Files.config_path

# folder size from which no similar name is proposed for a missing one
LARGE_FOLDER = 10_000


class ListRow(NamedTuple):
    # name as written: a path in data.root or an absolute one below it, with or without
    # ending
    name: str
    label: Any  # value from the reader of the list
    line: int = 0  # line number; 0: the list has no lines
    group: str = ""  # cell of the column `data.group`

    def __str__(self) -> str:
        return f"line {self.line}: '{self.name}'" if self.line else f"'{self.name}'"


class LocatedRow(NamedTuple):
    """Pair a row of a list with the file that it names."""

    row: ListRow
    size: int  # see `size_and_stamp`
    stamp: int


class Lists:
    """Read the lists whose keys are `train_ENDING`, `val_ENDING` and `test_ENDING`."""

    # Paths are absolute, or relative to `root`; without a list for val, `val_fraction`
    # of the training list is held out.

    def __init__(self, options: Any, ending: str) -> None:
        self.keys = {split: f"{split}_{ending}" for split in ("train", "val", "test")}
        self.files = {split: getattr(options, key) for split, key in self.keys.items()}
        self.options = options
        if not options.root or not self.files["train"]:
            raise ValueError(
                f"root and {self.keys['train']} must be set: the folder of the images,"
                " and the file that lists them"
            )
        if bool(self.files["val"]) == bool(options.val_fraction):
            raise ValueError(
                f"{self.keys['val']} or val_fraction is needed; set one of them"
            )

    def config_path(self, split: str) -> str:
        """Return the config path of the list with the images of a split."""
        return f"data.{self.keys[split if self.files[split] else 'train']}"

    def locate_images(
        self, split: str, read: Callable[[str, str], Iterable[ListRow]]
    ) -> tuple[dict[bytes, LocatedRow], list[str]]:
        """Return a split's images by their paths in `root`, and notes on omitted ones.

        `read`: (file, its config path) -> rows.
        """
        finder = _Finder(os.path.expanduser(self.options.root))

        def locate(name: str) -> tuple[dict[bytes, LocatedRow], int]:
            config_path = self.config_path(name)
            file = os.path.join(finder.root, os.path.expanduser(self.files[name]))
            rows = read(file, config_path)
            folder = os.path.relpath(os.path.dirname(file), finder.root)
            return finder.locate(rows, config_path, folder)

        splits = [name for name in self.keys if self.files[name]]
        list_split = split if split in splits else "train"
        images, repeats = locate(list_split)
        earlier = splits[: splits.index(list_split)]
        earlier_images = {name: locate(name)[0] for name in earlier}
        # Validation on training images would measure memorization, and nothing later
        # would reveal it.
        for name, other_images in earlier_images.items():
            if shared := sorted(images.keys() & other_images.keys()):
                first = shared[0]
                wrong = (
                    f"{images[first].row} is also in {self.config_path(name)},"
                    f" {other_images[first].row}, with {len(shared) - 1} more"
                )
                raise DataError(
                    self.config_path(split),
                    wrong,
                    "An image is in one of the lists",
                    "Remove it from one of them",
                )
        notes = []
        if repeats:
            notes.append(
                f"{repeats} lines of {self.config_path(list_split)} repeat another with"
                " the same label, and count once"
            )
        if list_split == splits[-1]:  # all lists are known
            unlisted = finder.count_unlisted([images, *earlier_images.values()])
            if unlisted:
                notes.append(f"{unlisted} images beside the listed ones are in no list")
        return images, notes

    def build_source(
        self,
        root: str,
        images: Mapping[bytes, LocatedRow],
        labels: LabelColumn,
        request: SplitRequest,
        notes: Sequence[str],
    ) -> ImageSource:
        """Return the located images of a split with their labels; see `source`."""
        files = Files(
            root,
            ((path, image.size, image.stamp) for path, image in images.items()),
            *notes,
        )
        rows = [image.row for image in images.values()]
        groups = (
            row.group or printable(path) for row, path in zip(rows, images, strict=True)
        )
        return source(
            files,
            labels._replace(subject=lambda row: str(rows[row])),
            request._replace(
                fraction=self.options.val_fraction, group=self.options.group
            ),
            groups,
        )


def read_list_file(
    path: str,
    config_path: str,
    endings: Sequence[str],
    form: str,
    parse: Callable[[str], Any],
) -> Any:
    """Parse a text file with one of these endings.

    A ValueError of `parse` means that its content is not `form`.
    """
    if not path.lower().endswith(tuple(endings)):
        raise DataError(
            config_path,
            f"is '{path}'",
            f"A file that ends in {', '.join(endings)}",
            "Write it as one of them",
        )
    try:
        return parse(tables.read_text(path))
    except OSError as error:
        raise DataError(
            config_path,
            f"'{path}' cannot be read ({error.strerror})",
            "A path, absolute or relative to data.root",
            "Check the path",
        ) from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise DataError(
            config_path, f"'{path}': {error}", form, "Correct the file"
        ) from error


def parse_table(
    content: str, path: str
) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the columns' names, and the lines by number; see `tables.parse_table`."""
    ending = os.path.splitext(path)[1].lower()
    header, rows = tables.parse_table(content, tables.DELIMITERS[ending])
    if os.fsencode(header[0].lower()).endswith(ENDINGS):
        raise ValueError(
            f"its first line is an image, '{header[0]}'; it must name the columns"
        )
    return header, rows


class _FolderFiles:
    def __init__(self, path: bytes) -> None:
        entries = entries_of(path, WHERE)[0] if os.path.isdir(path) else []
        files = [entry for entry in entries if not is_folder(entry)]
        self.names = {entry.name for entry in files}
        self.images = {entry.name for entry in files if is_image(entry)}

    def matching(self, name: bytes) -> list[bytes]:
        """Return the files of a name as written, without ending, or normalized."""
        if name in self.names:
            return [name]
        return self.by_stem.get(name) or self.by_form.get(_normalized(name), [])

    @cached_property
    def by_stem(self) -> dict[bytes, list[bytes]]:
        """Map names without the ending to images; built if a list lacks endings."""
        by_stem: dict[bytes, list[bytes]] = {}
        for name in self.images:
            by_stem.setdefault(posixpath.splitext(name)[0], []).append(name)
        return by_stem

    @cached_property
    def by_form(self) -> dict[bytes, list[bytes]]:
        """Map normalized names and stems to files; built if a name is not found."""
        by_form: dict[bytes, list[bytes]] = {}
        for name in self.names:
            by_form.setdefault(_normalized(name), []).append(name)
        for stem, names in self.by_stem.items():
            by_form.setdefault(_normalized(stem), []).extend(names)
        return by_form


def _normalized(name: bytes) -> bytes:
    return os.fsencode(nfc(os.fsdecode(name)))


class _Finder:
    """Find the files that lists name; each folder is listed once."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.folders: dict[bytes, _FolderFiles] = {}
        self.roots = [
            f"{path.rstrip('/')}/"
            for path in (os.path.abspath(root), os.path.realpath(root))
        ]

    def locate(
        self, rows: Iterable[ListRow], config_path: str, list_folder: str
    ) -> tuple[dict[bytes, LocatedRow], int]:
        """Return rows by the paths of their files, sorted, and the number of repeats.

        A name is a path in `root`, else one beside the list, in `list_folder` below
        `root`.
        """
        images: dict[bytes, LocatedRow] = {}
        missing: list[ListRow] = []
        repeats = 0
        root = os.fsencode(self.root)
        for row in rows:
            path = self._find_image(row, config_path, list_folder)
            if path is None:
                missing.append(row)
            elif path not in images:
                size, stamp = size_and_stamp(os.path.join(root, path))
                images[path] = LocatedRow(row, size, stamp)
            elif images[path].row.label == row.label:
                repeats += 1
            else:
                wrong = f"{row} is the image of {images[path].row}, with another label"
                raise DataError(
                    config_path, wrong, "One label for each image", "Remove one of them"
                )
        if missing:
            raise self._missing_error(missing, len(images), config_path)
        # by bytes: the same in every locale
        return {path: images[path] for path in sorted(images)}, repeats

    def count_unlisted(self, lists: Sequence[Mapping[bytes, LocatedRow]]) -> int:
        """Return the number of images in the visited folders that are in no list."""
        paths = (
            posixpath.join(folder, name)
            for folder, files in self.folders.items()
            for name in files.images
        )
        return sum(not any(path in images for images in lists) for path in paths)

    def _find_image(
        self, row: ListRow, config_path: str, list_folder: str
    ) -> bytes | None:
        names = [row.name]
        if "\\" in row.name:  # as Windows writes paths
            names.append(row.name.replace("\\", "/"))
        if not list_folder.startswith(".."):
            names += [posixpath.join(list_folder, name) for name in names]
        for name in names:
            path = _path_in_root(self.roots, row._replace(name=name), config_path)
            folder, base = posixpath.split(path)
            folder = self._visit(folder)
            matches = self.folders[folder].matching(base)
            if len(matches) > 1:
                images = ", ".join(
                    printable(posixpath.join(folder, match))
                    for match in sorted(matches)
                )
                raise DataError(
                    config_path,
                    f"{row} is more than one image: {images}",
                    "",
                    "Write the ending",
                )
            if matches:
                ending = printable(posixpath.splitext(matches[0])[1]).lower()
                if matches[0] not in self.folders[folder].images and ending in READ_BY:
                    raise DataError(
                        config_path,
                        f"{row} cannot be read here",
                        READ_BY[ending],
                        "Convert it, or install that",
                    )
                return posixpath.join(folder, matches[0])
        return None

    def _visit(self, folder: bytes) -> bytes:
        """List a folder, and return its path in `root` in the form on disk."""
        if folder in self.folders:
            return folder
        path = os.path.join(os.fsencode(self.root), folder)
        if folder and not os.path.isdir(path) and not folder.isascii():
            parent = self._visit(posixpath.dirname(folder))
            form = _normalized(posixpath.basename(folder))
            for name in folders(os.path.join(self.root, os.fsdecode(parent))):
                on_disk = posixpath.join(parent, os.fsencode(name))
                if _normalized(os.fsencode(name)) == form:
                    if on_disk != folder:
                        return self._visit(on_disk)
                    break
        self.folders[folder] = _FolderFiles(path)
        return folder

    def _missing_error(
        self, missing: Sequence[ListRow], located: int, config_path: str
    ) -> DataError:
        path = _path_in_root(self.roots, missing[0], config_path)
        files = self.folders[self._visit(posixpath.dirname(path))]
        names = [*files.by_stem, *files.images]
        suggestion = ""
        if len(names) < LARGE_FOLDER:
            name = printable(posixpath.basename(path))
            suggestion = did_you_mean(name, map(printable, names))
        wrong = (
            f"{missing[0]} is no image in '{self.root}'; {len(missing)} of"
            f" {located + len(missing)} names are missing"
        )
        return DataError(
            config_path,
            wrong,
            "Paths of images in data.root, ending optional",
            suggestion or "Correct the names",
        )


def _path_in_root(roots: Sequence[str], row: ListRow, config_path: str) -> bytes:
    """Return the normalized path of a row's file; `roots`: spellings of the root."""
    path = posixpath.normpath(row.name.strip())
    if path.startswith("/"):
        inside = [path.removeprefix(root) for root in roots if path.startswith(root)]
        path = inside[0] if inside else ".."
    if f"{path}/".startswith("../"):
        raise DataError(
            config_path,
            f"{row} does not lie in '{roots[0]}'",
            "Paths in data.root, relative or absolute",
            "Set data.root to a folder that holds all images",
        )
    return os.fsencode(path)
