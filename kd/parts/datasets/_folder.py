"""Image files below a folder: shared by the datasets of files."""

from __future__ import annotations

import os
import posixpath
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kd.core.errors import CorruptImage, DataError, did_you_mean
from kd.files.storage import retried
from kd.parts.datasets._decode import (
    ENDINGS,
    MAGIC,
    Listed,
    Names,
    Repeated,
    first_few,
    left_out,
    read_file,
    refuse,
    stamp,
    text,
)

WHERE = "data.root"
OTHER = re.compile(
    "txt|xml|jsonl?|[ct]sv|md|html?|pdf|ya?ml|toml|ini|log|docx?|xlsx?|py|ipynb|zip|tar|t?gz|bz2|xz|7z|rar|np[yz]|mat|"
    "pkl|pth?|safetensors|onnx|h5|hdf5|parquet|arrow|db|dcm|nii|mp[34]|avi|mov|mkv|wav|svg|e?ps|psd|ai|xcf|hei[cf]|avif|"
    "jp2|jxl|exr|hdr|dng|cr[23]|nef|arw|orf|rw2|ra[fw]|svs|ndpi|scn|lsm|stk|lif|czi"
)
"""Endings of files that are not tested for being images. Some begin like a TIFF: raw photographs."""


SYSTEM = {
    b"@eaDir",
    b"@Recycle",
    b"#recycle",
    b"$RECYCLE.BIN",
    b"__MACOSX",
    b"lost+found",
    b"System Volume Information",
}
"""Folders made by storage systems; some hold thumbnails. They count as hidden."""


class File(NamedTuple):
    size: int  # bytes
    stamp: int  # see `kd.core.contracts.Stamped`


class Files(NamedTuple):
    """Many image files in order, as columns: some 25 bytes each."""

    names: Names  # paths in the root
    sizes: np.ndarray  # int64 [N]
    stamps: np.ndarray  # uint64 [N]

    @classmethod
    def of(cls, pairs: Iterable[tuple[bytes, File]]) -> Files:
        sizes, stamps = array("q"), array("Q")

        def named() -> Iterator[bytes]:
            for name, file in pairs:
                sizes.append(file.size)
                stamps.append(file.stamp)
                yield name

        return cls(Names(named()), np.asarray(sizes), np.asarray(stamps))

    def take(self, ids: np.ndarray) -> Files:
        return Files(Names(self.names[id] for id in ids), self.sizes[ids], self.stamps[ids])


class ImageFolder(Listed):
    """A listing of image files, stored in a few arrays that are cheap to pickle and to share with forked workers."""

    where = WHERE
    noun = "file"

    def __init__(
        self,
        root: str,
        files: Files,
        labels: np.ndarray,
        classes: Sequence[str],
        notes: Sequence[str],
        groups: Repeated | None = None,
    ) -> None:
        """Store files below `root`."""
        super().__init__(classes, files.names, labels, files.sizes, files.stamps)
        self.notes, self._root, self.groups = tuple(notes), os.fsencode(root), groups

    def encoded(self, id: int) -> bytes:
        path = os.path.join(self._root, self.names[id])
        if not self._stamps[id] and not os.path.exists(path):
            raise _dangling(os.fsdecode(path), self.name(id))
        return read_file(path, self.subject(id), WHERE)


_Listed = tuple[bytes, frozenset[tuple[int, int]], Iterator[tuple[bytes, File | None]]]
"""A folder, its parents, and its content: names in order; folders end in "/" and have no file."""


class Listing:
    """Lists the image files below `folder`, with sizes and times, and the omitted files."""

    # Links are followed, hidden names left out. One `scandir` per folder gives the types of entries. An entry's status
    # is one more request, which NFS serves from the same listing.

    def __init__(self, root: str, folder: bytes) -> None:
        self._root, self._all, self._other = os.fsencode(root), list[bytes](), Counter[str]()
        self.folders: dict[bytes, int] = {}  # folders that directly hold images, by path in the root: position
        folder_of = array("i")
        self.files = Files.of(self._images(folder, folder_of))
        """Sorted by the bytes of their paths: the same order in every locale."""
        self.folder_of = np.asarray(folder_of)  # the position of each image's folder, int32 [N]
        self.notes = (*left_out(self._other), *self._without_images())

    def _images(self, folder: bytes, folder_of: array[int]) -> Iterator[tuple[bytes, File]]:
        """Yield the images below a folder in byte order of their paths; one folder at a time is held as objects."""
        todo = [self._listed(folder, frozenset())]
        while todo:
            relative, above, found = todo[-1]
            name, file = next(found, (b"", None))
            if file is not None:
                folder_of.append(self.folders.setdefault(relative, len(self.folders)))
                yield _join(relative, name), file
            elif name:
                todo.append(self._listed(_join(relative, name[:-1]), above))
            else:
                todo.pop()

    def _listed(self, relative: bytes, above: frozenset[tuple[int, int]]) -> _Listed:
        """List a folder; `above`: its parents."""
        path = os.path.join(self._root, relative) if relative else self._root
        entries, status = entries_of(path)
        self._all.append(relative)
        here = status.st_dev, status.st_ino
        if here in above:
            raise DataError(WHERE, f"the folder '{text(path)}' is a link to a folder above it", "", "Remove the link")
        found: list[tuple[bytes, File | None]] = []
        for entry in entries:
            if is_folder(entry):
                found.append((entry.name + b"/", None))
            elif is_image(entry):
                found.append((entry.name, file_of(entry)))
            else:
                self._other[text(posixpath.splitext(entry.name)[1])] += 1
        return relative, above | {here}, iter(sorted(found))  # the "/" sorts a folder like its images

    def _without_images(self) -> list[str]:
        """Report folders without images, only the uppermost of nested ones."""
        holding: set[bytes] = set()
        for folder in self.folders:
            while folder not in holding:
                holding.add(folder)
                folder = posixpath.dirname(folder)
        bare = sorted(name for name in self._all[1:] if name not in holding and posixpath.dirname(name) in holding)
        if not bare:
            return []
        words = "1 folder has" if len(bare) == 1 else f"{len(bare)} folders have"
        return [f"{words} no image and {'is' if len(bare) == 1 else 'are'} no class: {first_few([*map(text, bare)])}"]


def _join(folder: bytes, name: bytes) -> bytes:
    return folder + b"/" + name if folder else name


def entries_of(path: bytes) -> tuple[list[os.DirEntry[bytes]], os.stat_result]:
    """Return a folder's content without hidden names, and the folder's metadata before listing."""
    try:
        status = os.stat(path)
        with os.scandir(path) as listing:
            entries = [e for e in listing if not e.name.startswith(b".") and e.name not in SYSTEM]  # macOS ._* too
    except OSError as error:
        raise DataError(WHERE, f"the folder '{text(path)}' cannot be listed ({error.strerror})") from error
    return entries, status


def is_image(entry: os.DirEntry[bytes]) -> bool:
    """Return whether a file is an image by its ending, else by its first bytes."""
    if entry.name.lower().endswith(ENDINGS):
        return True
    name, _, ending = entry.name.lower().rpartition(b".")
    if name and OTHER.fullmatch(text(ending)):
        return False
    try:
        if not entry.is_file():
            return False
        with open(entry.path, "rb", buffering=0) as file:
            head = file.read(12)
    except OSError:
        return False
    # Texts may begin with "BM" too. A file with an unknown ending, such as 4.5, may be a raw photograph.
    return head.startswith(MAGIC[:-1] if not name else MAGIC[:-3]) and (head[:4] != b"RIFF" or head[8:] == b"WEBP")


def _dangling(path: str, name: str) -> CorruptImage:
    """Return the error for a link without a target at listing; a target that vanishes later means missing storage."""
    target = os.readlink(path) if os.path.islink(path) else "?"
    return refuse(f"file '{name}'", WHERE, f"it is a link to '{target}', where no file is")


def file_of(entry: os.DirEntry[bytes]) -> File:
    try:
        status = entry.stat()
    except OSError:
        if entry.is_symlink():
            return File(-1, 0)  # a dangling link; `_dangling` reports it
        status = retried(entry.stat, f"file '{text(entry.path)}'", WHERE)
    return File(status.st_size, stamp(status))


def is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: listed if it is named like an image; decoding reports the error
        return False


def folders(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the folders in a folder, sorted, without hidden ones; none if it cannot be listed."""
    try:
        kept = (e.name for e in os.scandir(path) if e.is_dir() and not e.name.startswith("."))
        return sorted(name for name in kept if os.fsencode(name) not in SYSTEM)
    except OSError:
        return []


def find_root(root: str) -> str:
    root = os.path.expanduser(root)
    if os.path.isdir(root):
        return root
    if os.path.exists(root):
        raise DataError(WHERE, f"'{root}' is a file", "A folder of images", "Unpack the archive and give its folder")
    path = os.path.abspath(root)
    near = did_you_mean(os.path.basename(path), folders(os.path.dirname(path)))
    raise DataError(WHERE, f"the folder '{root}' does not exist", near, "Check the path, or fetch the images first")
