"""Images in folders, one folder a class: with train/val folders, with lists of files, or split by fraction.

Food-101 as it is distributed, no file moved: `root: food-101/images`, `train_list: ../meta/train.txt`,
`val_list: ../meta/test.txt`.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kd.datasets._decode import first_few, hold_out, label_images
from kd.datasets._folder import ENDINGS, WHERE, File, ImageFolder, check_root, folders, scan, text
from kd.errors import DataError, did_you_mean
from kd.types import DatasetFacts, file_key

ALSO_CALLED = {"train": ("training",), "val": ("validation", "valid", "dev", "test")}
"""Split folders by other names: offered in the error, never chosen silently (validating on `test` is a decision)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Where the folders lie and how they are split."""

    root: str = file_key()
    """Folder of the images. A class is the path of the folder that directly holds images: `apple`, `fruit/apple`."""
    train_split: str = "train"
    """Folder of the training images in `root`; not used with `val_fraction` or lists."""
    val_split: str = "val"
    """Folder of the validation images in `root`; not used with `val_fraction` or lists."""
    val_fraction: float = 0.0
    """Share of each class held out for validation, chosen by a hash of the path, where `root` has no split folders."""
    train_list: str = file_key("", within="root")
    """Text file of the training images: a path in `root` a line, ending optional. Absolute, or relative to `root`."""
    val_list: str = file_key("", within="root")
    """Text file of the validation images, like `train_list`."""
    unlabelled: str = "unlabelled"
    """With `labels: some`, the folder beside the classes' whose images have no label."""

    def __post_init__(self) -> None:
        if not self.root:
            raise ValueError("root is empty; it must be the folder of the images")
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"val_fraction is {self.val_fraction}; it must be at least 0 and below 1")
        if bool(self.train_list) != bool(self.val_list):
            raise ValueError("train_list and val_list go together; set both or neither")
        if self.train_list and self.val_fraction:
            raise ValueError("val_fraction and lists exclude each other; set one of them")
        if not self.train_split or not self.val_split or self.train_split == self.val_split:
            raise ValueError("train_split and val_split must be two different folders; to share one, set val_fraction")


def facts(options: Options) -> DatasetFacts:
    """Return what others must know of it."""
    return DatasetFacts(root=options.root)


def build(options: Options, split: str, classes: Sequence[str] | None, labels: str = "all") -> ImageFolder:
    """List the images of a split; without labels they may lie in any folders.

    Raises:
        DataError: no such folder or list, no images, only one class, a class that training does not know.
    """
    root = os.path.expanduser(options.root)
    check_root(root)
    folder = b""
    if options.train_list:
        files = _from_list(options, split, root)
        if split == "val":
            _check_apart(options, root, files)
    elif options.val_fraction:
        files = scan(root, b"")
        _check_unsplit(options, files)
    else:
        folder = os.fsencode(_split_folder(options, split, root))
        files = scan(root, folder)
    names = sorted(files)  # by bytes: the same on every machine, whatever its locale
    class_of = [text(posixpath.dirname(name)[len(folder) + 1 if folder else 0 :]) for name in names]
    _check_listing(names, class_of if labels != "none" else [], os.path.join(root, os.fsdecode(folder)), split)
    if labels == "some":
        class_of = ["" if f"{name}/".startswith(f"{options.unlabelled}/") else name for name in class_of]
    order, label = label_images(class_of, sorted({*class_of} - {""}), classes, WHERE, split, labels)
    if options.val_fraction:
        keep = hold_out(names, label, options.val_fraction) == (split == "val")
        if not keep.any():
            raise DataError(WHERE, "no class has two images, so that none is left for validation", "", "Add images")
        names, label = [names[id] for id in np.flatnonzero(keep)], label[keep]
    return ImageFolder(root, names, [files[name] for name in names], label, order)


def _from_list(options: Options, split: str, root: str) -> dict[bytes, File]:
    key = "train_list" if split == "train" else "val_list"
    where = f"data.{key}"
    files = scan(root, b"")
    stems: dict[bytes, list[bytes]] = {}
    for name in files:
        stems.setdefault(posixpath.splitext(name)[0], []).append(name)
    seen: dict[bytes, int] = {}
    for number, entry in _lines(_list_path(getattr(options, key), root), where):
        matches = [entry] if entry in files else stems.get(entry, [])
        line = f"line {number}: '{text(entry)}'"
        if not matches:
            near = did_you_mean(text(entry), map(text, stems)) if len(stems) < 10_000 else ""  # slow on many
            raise DataError(
                where, f"{line} is no image in '{root}'", "A path in data.root a line, ending optional", near
            )
        if len(matches) > 1:
            both = ", ".join(map(text, sorted(matches)))
            raise DataError(where, f"{line} is more than one image: {both}", "", "Write the ending")
        if matches[0] in seen:
            raise DataError(where, f"{line} is listed already in line {seen[matches[0]]}", "", "Remove one of them")
        seen[matches[0]] = number
    return {name: files[name] for name in seen}


def _check_apart(options: Options, root: str, val: Collection[bytes]) -> None:
    # Validation on training images measures memory; nothing later in the run would show it.
    held = {posixpath.splitext(name)[0] for name in val} | set(val)
    for number, entry in _lines(_list_path(options.train_list, root), "data.train_list"):
        if entry in held:
            raise DataError(
                "data.val_list",
                f"'{text(entry)}' is also in data.train_list, line {number}",
                "An image is in one of the lists",
                "Remove it from one of them",
            )


def _list_path(path: str, root: str) -> str:
    return os.path.join(root, os.path.expanduser(path))


def _lines(path: str, where: str) -> list[tuple[int, bytes]]:
    try:
        with open(path, "rb") as file:
            lines = file.read().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise DataError(
            where,
            f"the list '{path}' cannot be read ({error.strerror})",
            "An absolute path, or one relative to data.root",
            "Check the path",
        ) from error
    return [(number, posixpath.normpath(line.strip())) for number, line in enumerate(lines, 1) if line.strip()]


def _split_folder(options: Options, split: str, root: str) -> str:
    key = "train_split" if split == "train" else "val_split"
    name = getattr(options, key)
    if os.path.isdir(os.path.join(root, name)):
        return name.strip("/")
    there = folders(root)
    near = next((f"Did you mean '{other}'?" for other in ALSO_CALLED[split] if other in there), "")
    raise DataError(
        WHERE,
        f"'{root}' has no folder '{name}'. It has: {first_few(there) or 'no folders'}",
        did_you_mean(name, there) or near,
        f"Set data.{key}, or data.val_fraction=0.1 where the class folders lie directly in data.root, or lists",
    )


def _check_unsplit(options: Options, names: Collection[bytes]) -> None:
    # Else `train/apple` and `val/apple` would become two classes, and nothing would look wrong.
    for folder in (options.train_split, options.val_split):
        if any(name.startswith(os.fsencode(folder) + b"/") and name.count(b"/") > 1 for name in names):
            raise DataError(
                "data.val_fraction",
                f"data.root is already split: it has a folder '{folder}' with classes in it",
                "val_fraction is for a folder of classes",
                f"Remove val_fraction, or set data.root to that '{folder}'",
            )


def _check_listing(names: Sequence[bytes], class_of: Sequence[str], path: str, split: str) -> None:
    if not names:
        endings = ", ".join(ending.decode() for ending in ENDINGS)
        raise DataError(
            WHERE,
            f"no images for the split '{split}' in '{path}'",
            f"Files in class folders, ending in {endings} (capitals too)",
            "Check the path",
        )
    if "" in class_of:
        outside = text(names[class_of.index("")])
        raise DataError(
            WHERE,
            f"the image '{outside}' lies outside any class folder, with {class_of.count('') - 1} more",
            "Images lie in a folder named like their class",
            "Move or delete them",
        )
