"""Image files below a folder: shared by the datasets of files."""

from __future__ import annotations

import os
import posixpath
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kd.datasets._decode import AVIF, HEIF, MAGIC, READ_BY, Listed, Names, fingerprint, first_few, read_file, stamp
from kd.errors import DataError, did_you_mean
from kd.files import pixels
from kd.files.storage import retried
from kd.types import Decoded

WHERE = "data.root"
MORE = [*(["avif"] if AVIF else []), *(["heic", "heif"] if HEIF else [])]
ENDINGS = tuple(f".{ending}".encode() for ending in [*pixels.ENDINGS, *MORE])
MOST_KINDS = 6
"""Endings that a line names."""


class File(NamedTuple):
    """What a listing says about an image file."""

    size: int
    """Bytes."""
    stamp: int
    """See `kd.contracts.Stamped`."""


class ImageFolder(Listed):
    """A listing of image files. Its memory is four arrays, cheap to pickle and to share with forked workers."""

    def __init__(
        self, root: str, files: Mapping[bytes, File], labels: np.ndarray, classes: Sequence[str], notes: Sequence[str]
    ) -> None:
        """Take names below `root` in order with their files, and labels: a class each, or int8 [N, C] of sets."""
        self.classes, self.notes = tuple(classes), tuple(notes)
        self._root = os.fsencode(root)
        self._names = Names([*files])
        self._labels = labels
        self._stamps = np.array([file.stamp for file in files.values()], np.uint64)
        self.fingerprint = fingerprint(self.classes, self._names.buffer, labels, [file.size for file in files.values()])

    def name(self, id: int) -> str:
        """Return the path in the root folder, with "/" on every system."""
        return text(self._names[id])

    def decode(self, id: int) -> Decoded:
        """Return one image as RGB, 8 bits a channel."""
        path = os.path.join(self._root, self._names[id])
        return read_file(path, f"file '{self.name(id)}'", WHERE)


class Listing(NamedTuple):
    """What lies below a folder."""

    files: dict[bytes, File]
    """The images, as paths in the root."""
    notes: tuple[str, ...]
    """What is left out, a line each."""


def scan(root: str, folder: bytes) -> Listing:
    """List the image files below `folder`, with their sizes and times, and say what is left out.

    Links are followed, hidden names left out. One `scandir` a folder says what an entry is. Its status is one more
    request to the storage, which NFS answers from the same listing.
    """
    files: dict[bytes, File] = {}
    other: Counter[str] = Counter()
    folders: list[bytes] = []
    todo: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    while todo:
        relative, above = todo.pop()
        folders.append(relative)
        path = os.path.join(os.fsencode(root), relative) if relative else os.fsencode(root)
        entries, here = entries_of(path)
        if here in above:
            raise DataError(WHERE, f"the folder '{text(path)}' is a link to a folder above it", "", "Remove the link")
        prefix = relative + b"/" if relative else b""
        for entry in entries:
            if is_folder(entry):
                todo.append((prefix + entry.name, above | {here}))
            elif is_image(entry):
                files[prefix + entry.name] = file_of(entry)
            else:
                other[text(posixpath.splitext(entry.name)[1])] += 1
    return Listing(files, (*_unread(other), *_without_images(files, folders)))


def entries_of(path: bytes) -> tuple[list[os.DirEntry[bytes]], tuple[int, int]]:
    """Return what a folder holds, without hidden names, and by what the system knows the folder."""
    try:
        status = os.stat(path)
        with os.scandir(path) as listing:
            entries = [entry for entry in listing if not entry.name.startswith(b".")]  # macOS ._* too
    except OSError as error:
        raise DataError(WHERE, f"the folder '{text(path)}' cannot be listed ({error.strerror})") from error
    return entries, (status.st_dev, status.st_ino)


def is_image(entry: os.DirEntry[bytes]) -> bool:
    """Return whether a file is an image by its name, or by its first bytes where the name has no ending."""
    if b"." in entry.name:
        return entry.name.lower().endswith(ENDINGS)
    try:
        if not entry.is_file():
            return False
        with open(entry.path, "rb", buffering=0) as file:
            return file.read(8).startswith(MAGIC[:-1])  # "BM" begins texts too
    except OSError:
        return False


def _unread(other: Counter[str]) -> list[str]:
    """Count the files that are no images, by their endings."""
    if not other:
        return []
    words = []
    for ending, count in other.most_common(MOST_KINDS):
        remedy = READ_BY.get(ending.lower(), "")
        words.append(f"{count} {ending or 'without an ending'}" + (f" ({remedy})" if remedy else ""))
    more = f" and {len(other) - MOST_KINDS} kinds more" if len(other) > MOST_KINDS else ""
    count = other.total()
    return [f"{count} {'file is' if count == 1 else 'files are'} not read: {', '.join(words)}{more}"]


def _without_images(files: Iterable[bytes], folders: Sequence[bytes]) -> list[str]:
    """Name the folders without an image in them or below; of such a folder in another one, the upper alone."""
    holding: set[bytes] = set()
    for folder in {posixpath.dirname(name) for name in files}:
        while folder not in holding:
            holding.add(folder)
            folder = posixpath.dirname(folder)
    bare = sorted(name for name in folders[1:] if name not in holding and posixpath.dirname(name) in holding)
    if not bare:
        return []
    words = "1 folder has" if len(bare) == 1 else f"{len(bare)} folders have"
    return [f"{words} no image and {'is' if len(bare) == 1 else 'are'} no class: {first_few([*map(text, bare)])}"]


def file_of(entry: os.DirEntry[bytes]) -> File:
    """Return size and stamp of an entry."""
    try:
        status = entry.stat()
    except OSError:
        if entry.is_symlink():
            return File(-1, 0)  # it leads nowhere; decode says so
        status = retried(entry.stat, f"file '{text(entry.path)}'", WHERE)
    return File(status.st_size, stamp(status))


def is_folder(entry: os.DirEntry[bytes]) -> bool:
    """Return whether an entry is a folder, or a link to one."""
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


def find_root(root: str) -> str:
    """Return the path of a folder, `~` expanded."""
    root = os.path.expanduser(root)
    if os.path.isdir(root):
        return root
    if os.path.exists(root):
        raise DataError(WHERE, f"'{root}' is a file", "A folder of images", "Unpack the archive and give its folder")
    path = os.path.abspath(root)
    near = did_you_mean(os.path.basename(path), folders(os.path.dirname(path)))
    raise DataError(WHERE, f"the folder '{root}' does not exist", near, "Check the path, or fetch the images first")


def text(name: bytes) -> str:
    """Return a file name as text."""
    return name.decode("utf-8", "backslashreplace")  # a name in another encoding must still print
