"""Image files below a folder: shared by the datasets of files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kd.datasets._decode import Names, fingerprint, read_file, stamp
from kd.errors import DataError, did_you_mean
from kd.files import pixels
from kd.files.retry import retried
from kd.types import Decoded, Label

WHERE = "data.root"
ENDINGS = tuple(f".{ending}".encode() for ending in pixels.ENDINGS)


class File(NamedTuple):
    """What a listing says about an image file."""

    size: int
    """Bytes."""
    stamp: int
    """See `kd.contracts.Stamped`."""


class ImageFolder:
    """A listing of image files. Its memory is four arrays, cheap to pickle and to share with forked workers."""

    def __init__(
        self, root: str, names: Sequence[bytes], files: Sequence[File], labels: np.ndarray, classes: Sequence[str]
    ) -> None:
        """Take names below `root` in order, their files, and labels: a class each, or int8 [N, C] of sets."""
        self.classes = tuple(classes)
        self._root = os.fsencode(root)
        self._names = Names(names)
        self._labels = labels
        self._stamps = np.array([file.stamp for file in files], np.uint64)
        self.fingerprint = fingerprint(self.classes, self._names.buffer, labels, [file.size for file in files])

    def __len__(self) -> int:
        return len(self._names)

    def label(self, id: int) -> Label:
        """Return the label of one image, or its set of labels."""
        return int(self._labels[id]) if self._labels.ndim == 1 else self._labels[id]

    def name(self, id: int) -> str:
        """Return the path in the root folder, with "/" on every system."""
        return text(self._names[id])

    def stamp(self, id: int) -> int:
        """Return a number made of the times of the file when it was listed."""
        return int(self._stamps[id])

    def prepare(self) -> None:
        """Do nothing: the images are there."""

    def decode(self, id: int) -> Decoded:
        """Return one image as RGB, 8 bits a channel.

        Raises:
            CorruptImage: the file is no whole image.
            DataError: it is gone or cannot be read.
        """
        path = os.path.join(self._root, self._names[id])
        return read_file(path, f"file '{self.name(id)}'", WHERE)


def scan(root: str, folder: bytes) -> dict[bytes, File]:
    """Return the image files below `folder`, as paths in `root`, with their sizes and times.

    Links are followed, hidden names left out. One `scandir` a folder says what an entry is. Its status is one more
    request to the storage, which NFS answers from the same listing.
    """
    files: dict[bytes, File] = {}
    todo: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    while todo:
        relative, above = todo.pop()
        path = os.path.join(os.fsencode(root), relative) if relative else os.fsencode(root)
        try:
            status = os.stat(path)
            with os.scandir(path) as listing:
                entries = [entry for entry in listing if not entry.name.startswith(b".")]  # macOS ._* too
        except OSError as error:
            raise DataError(WHERE, f"the folder '{text(path)}' cannot be listed ({error.strerror})") from error
        here = (status.st_dev, status.st_ino)
        if here in above:
            raise DataError(WHERE, f"the folder '{text(path)}' is a link to a folder above it", "", "Remove the link")
        prefix = relative + b"/" if relative else b""
        for entry in entries:
            if _is_folder(entry):
                todo.append((prefix + entry.name, above | {here}))
            elif entry.name.lower().endswith(ENDINGS):
                files[prefix + entry.name] = _file(entry)
    return files


def _file(entry: os.DirEntry[bytes]) -> File:
    try:
        status = entry.stat()
    except OSError:
        if entry.is_symlink():
            return File(-1, 0)  # it leads nowhere; decode says so
        status = retried(entry.stat, f"file '{text(entry.path)}'", WHERE)
    return File(status.st_size, stamp(status))


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: listed if it is named like an image, and decode says what is wrong
        return False


def folders(path: str) -> list[str]:
    """List the folders in a folder; none where it cannot be read."""
    try:
        return sorted(e.name for e in os.scandir(path) if e.is_dir() and not e.name.startswith("."))
    except OSError:
        return []


def check_root(root: str) -> None:
    """Require a folder.

    Raises:
        DataError: it is none; a similar name beside it is offered.
    """
    if os.path.isdir(root):
        return
    if os.path.exists(root):
        raise DataError(WHERE, f"'{root}' is a file", "A folder of images", "Unpack the archive and give its folder")
    path = os.path.abspath(root)
    near = did_you_mean(os.path.basename(path), folders(os.path.dirname(path)))
    raise DataError(WHERE, f"the folder '{root}' does not exist", near, "Check the path, or fetch the images first")


def text(name: bytes) -> str:
    """Return a file name as text."""
    return name.decode("utf-8", "backslashreplace")  # a name in another encoding must still print
