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

from kd.datasets._decode import Names, decode, fingerprint, hold_out, label_images, retried
from kd.errors import DataError, did_you_mean
from kd.types import Decoded

WHERE = "data.root"
ENDINGS = (b".jpg", b".jpeg", b".png", b".bmp", b".webp", b".gif", b".tif", b".tiff")
ALSO_CALLED = {"train": ("training",), "val": ("validation", "valid", "dev", "test")}
"""Split folders by other names: offered in the error, never chosen silently (validating on `test` is a decision)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Where the folders lie and how they are split."""

    root: str
    """Folder of the images. A class is the path of the folder that directly holds images: `apple`, `fruit/apple`."""
    train_split: str = "train"
    """Folder of the training images in `root`; not used with `val_fraction` or lists."""
    val_split: str = "val"
    """Folder of the validation images in `root`; not used with `val_fraction` or lists."""
    val_fraction: float = 0.0
    """Share of each class held out for validation, chosen by a hash of the path, where `root` has no split folders."""
    train_list: str = ""
    """Text file of the training images: a path in `root` a line, ending optional. Absolute, or relative to `root`."""
    val_list: str = ""
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


class ImageFolder:
    """A listing of image files. Its memory is three arrays, cheap to pickle and to share with forked workers."""

    def __init__(
        self, root: str, names: Sequence[bytes], sizes: Sequence[int], labels: np.ndarray, classes: Sequence[str]
    ) -> None:
        self.classes = tuple(classes)
        self._root = os.fsencode(root)
        self._names = Names(names)
        self._labels = labels
        self.fingerprint = fingerprint(self.classes, self._names.buffer, labels, sizes)

    def __len__(self) -> int:
        return len(self._names)

    def label(self, id: int) -> int:
        """Return the label of one image."""
        return int(self._labels[id])

    def name(self, id: int) -> str:
        """Return the path in the root folder, with "/" on every system."""
        return _text(self._names[id])

    def prepare(self) -> None:
        """Do nothing: the images are there."""

    def decode(self, id: int) -> Decoded:
        """Return one image as RGB, 8 bits a channel.

        Raises:
            CorruptImage: the file is no whole image.
            DataError: it is gone or cannot be read.
        """
        subject = f"file '{self.name(id)}'"
        return decode(retried(lambda: _content(self._path(id)), subject, WHERE), subject, WHERE)

    def _path(self, id: int) -> bytes:
        return os.path.join(self._root, self._names[id])


def build(options: Options, split: str, classes: Sequence[str] | None, labels: str = "all") -> ImageFolder:
    """List the images of a split; without labels they may lie in any folders.

    Raises:
        DataError: no such folder or list, no images, only one class, a class that training does not know.
    """
    root = os.path.expanduser(options.root)
    _check_root(root)
    folder = b""
    if options.train_list:
        files = _from_list(options, split, root)
        if split == "val":
            _check_apart(options, root, files)
    elif options.val_fraction:
        files = _scan(root, b"")
        _check_unsplit(options, files)
    else:
        folder = os.fsencode(_split_folder(options, split, root))
        files = _scan(root, folder)
    names = sorted(files)  # by bytes: the same on every machine, whatever its locale
    found = [_text(posixpath.dirname(name)[len(folder) + 1 if folder else 0 :]) for name in names]
    _check_found(names, found if labels != "none" else [], os.path.join(root, os.fsdecode(folder)), split)
    if labels == "some":
        found = ["" if f"{name}/".startswith(f"{options.unlabelled}/") else name for name in found]
    order, label = label_images(found, sorted({*found} - {""}), classes, WHERE, split, labels)
    if options.val_fraction:
        keep = hold_out(names, label, options.val_fraction) == (split == "val")
        if not keep.any():
            raise DataError(WHERE, "no class has two images, so that none is left for validation", "", "Add images")
        names, label = [names[id] for id in np.flatnonzero(keep)], label[keep]
    return ImageFolder(root, names, [files[name] for name in names], label, order)


def _scan(root: str, folder: bytes) -> dict[bytes, int]:
    """Return the image files below `folder`, as paths in `root`, with their sizes in bytes.

    Links are followed, hidden names left out. One `scandir` a folder says what an entry is. Its size is one more
    request to the storage, which NFS answers from the same listing.
    """
    found: dict[bytes, int] = {}
    todo: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    while todo:
        relative, above = todo.pop()
        path = os.path.join(os.fsencode(root), relative) if relative else os.fsencode(root)
        try:
            status = os.stat(path)
            with os.scandir(path) as listing:
                entries = [entry for entry in listing if not entry.name.startswith(b".")]  # macOS ._* too
        except OSError as error:
            raise DataError(WHERE, f"the folder '{_text(path)}' cannot be listed ({error.strerror})") from error
        here = (status.st_dev, status.st_ino)
        if here in above:
            raise DataError(WHERE, f"the folder '{_text(path)}' is a link to a folder above it", "", "Remove the link")
        prefix = relative + b"/" if relative else b""
        for entry in entries:
            if _is_folder(entry):
                todo.append((prefix + entry.name, above | {here}))
            elif entry.name.lower().endswith(ENDINGS):
                found[prefix + entry.name] = _size(entry)
    return found


def _size(entry: os.DirEntry[bytes]) -> int:
    try:
        return entry.stat().st_size
    except OSError:
        if entry.is_symlink():
            return -1  # it leads nowhere; decode says so
        return retried(lambda: entry.stat().st_size, f"file '{_text(entry.path)}'", WHERE)


def _content(path: bytes) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: listed if it is named like an image, and decode says what is wrong
        return False


def _from_list(options: Options, split: str, root: str) -> dict[bytes, int]:
    key = "train_list" if split == "train" else "val_list"
    where = f"data.{key}"
    files = _scan(root, b"")
    stems: dict[bytes, list[bytes]] = {}
    for name in files:
        stems.setdefault(posixpath.splitext(name)[0], []).append(name)
    seen: dict[bytes, int] = {}
    for number, entry in _lines(_list_path(getattr(options, key), root), where):
        matches = [entry] if entry in files else stems.get(entry, [])
        line = f"line {number}: '{_text(entry)}'"
        if not matches:
            near = did_you_mean(_text(entry), map(_text, stems)) if len(stems) < 10_000 else ""  # slow on many
            raise DataError(
                where, f"{line} is no image in '{root}'", "A path in data.root a line, ending optional", near
            )
        if len(matches) > 1:
            both = ", ".join(map(_text, sorted(matches)))
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
                f"'{_text(entry)}' is also in data.train_list, line {number}",
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
    folders = _folders(root)
    near = next((f"Did you mean '{other}'?" for other in ALSO_CALLED[split] if other in folders), "")
    shown = ", ".join(folders[:12]) + (", ..." if len(folders) > 12 else "")
    raise DataError(
        WHERE,
        f"'{root}' has no folder '{name}'. It has: {shown or 'no folders'}",
        did_you_mean(name, folders) or near,
        f"Set data.{key}, or data.val_fraction=0.1 where the class folders lie directly in data.root, or lists",
    )


def _folders(path: str) -> list[str]:
    try:
        return sorted(e.name for e in os.scandir(path) if e.is_dir() and not e.name.startswith("."))
    except OSError:
        return []


def _check_root(root: str) -> None:
    if os.path.isdir(root):
        return
    if os.path.exists(root):
        raise DataError(WHERE, f"'{root}' is a file", "A folder of images", "Unpack the archive and give its folder")
    path = os.path.abspath(root)
    near = did_you_mean(os.path.basename(path), _folders(os.path.dirname(path)))
    raise DataError(WHERE, f"the folder '{root}' does not exist", near, "Check the path, or fetch the images first")


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


def _check_found(names: Sequence[bytes], found: Sequence[str], path: str, split: str) -> None:
    if not names:
        endings = ", ".join(ending.decode() for ending in ENDINGS)
        raise DataError(
            WHERE,
            f"no images for the split '{split}' in '{path}'",
            f"Files in class folders, ending in {endings} (capitals too)",
            "Check the path",
        )
    if "" in found:
        outside = _text(names[found.index("")])
        raise DataError(
            WHERE,
            f"the image '{outside}' lies outside any class folder, with {found.count('') - 1} more",
            "Images lie in a folder named like their class",
            "Move or delete them",
        )


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")  # a name in another encoding must still print
