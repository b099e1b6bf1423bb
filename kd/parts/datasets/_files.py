"""Image files below a folder: the storage of `imagefolder`, `csv` and `multilabel`."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator

import numpy as np

from kd.core.errors import DataError, did_you_mean
from kd.files.folders import folders, printable
from kd.files.storage import read_with_retries
from kd.parts.datasets._columns import Names
from kd.parts.datasets._decode import read_file, refuse
from kd.parts.datasets._source import Storage, stamp


class Files(Storage):
    """Files below `root`, by their paths in it."""

    noun = "file"

    def __init__(
        self, root: str, listed: Iterable[tuple[bytes, int, int]], *notes: str
    ) -> None:
        """Store paths in `root` with `size_and_stamp` of each."""
        sizes, stamps = array("q"), array("Q")

        def named() -> Iterator[bytes]:
            for path, size, mark in listed:
                sizes.append(size)
                stamps.append(mark)
                yield path

        super().__init__(Names(named()), np.asarray(sizes), np.asarray(stamps))
        self.root, self.notes = os.fsencode(root), notes

    def read(self, row: int) -> bytes:
        """Return the bytes of a file; CorruptImage: it is a link without a target."""
        path = os.path.join(self.root, self.names[row])
        if not self.stamps[row] and not os.path.exists(
            path
        ):  # one that vanishes later means missing storage
            target = os.readlink(path) if os.path.islink(path) else b"?"
            wrong = f"it is a link to '{printable(target)}', where no file is"
            raise refuse(self.subject(row), self.config_path, wrong)
        return read_file(path, self.subject(row), self.config_path)


def size_and_stamp(path: bytes) -> tuple[int, int]:
    """Return a file's bytes and its `stamp`; (-1, 0): it is a link without a target."""
    try:
        status = os.stat(path)
    except OSError:
        if os.path.islink(path):
            return -1, 0
        status = read_with_retries(
            lambda: os.stat(path), f"file '{printable(path)}'", Files.config_path
        )
    return status.st_size, stamp(status)


def find_root(root: str) -> str:
    """Return the folder `data.root`; DataError: no such folder."""
    root = os.path.expanduser(root)
    if os.path.isdir(root):
        return root
    if os.path.exists(root):
        wrong = f"'{root}' is a file"
        raise DataError(
            Files.config_path,
            wrong,
            "A folder of images",
            "Unpack the archive and give its folder",
        )
    path = os.path.abspath(root)
    near = did_you_mean(os.path.basename(path), folders(os.path.dirname(path)))
    wrong = f"the folder '{root}' does not exist"
    raise DataError(
        Files.config_path, wrong, near, "Check the path, or fetch the images first"
    )
