"""Read image files below a folder, for `imagefolder`, `csv` and `multilabel`."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator

import numpy as np

from kd.core.errors import DataError, did_you_mean
from kd.files.folders import folders, printable
from kd.files.storage import read_with_retries
from kd.parts.datasets._columns import Names
from kd.parts.datasets._decode import corrupt_image, read_image_file
from kd.parts.datasets._source import Storage, file_stamp


class Files(Storage):
    """Read files below `root` by their paths in it."""

    noun = "file"

    def __init__(
        self, root: str, listed: Iterable[tuple[bytes, int, int]], *notes: str
    ) -> None:
        """Store paths in `root` with `size_and_stamp` of each."""
        sizes = array("q")
        stamps = array("Q")

        def paths() -> Iterator[bytes]:
            for path, size, stamp in listed:
                sizes.append(size)
                stamps.append(stamp)
                yield path

        super().__init__(Names(paths()), np.asarray(sizes), np.asarray(stamps))
        self.root = os.fsencode(root)
        self.notes = notes

    def read(self, row: int) -> bytes:
        """Return the bytes of a file; CorruptImage: it is a link without a target."""
        path = os.path.join(self.root, self.names[row])
        # A file that vanishes later means missing storage.
        if not self.stamps[row] and not os.path.exists(path):
            target = os.readlink(path) if os.path.islink(path) else b"?"
            wrong = f"it is a link to '{printable(target)}', where no file is"
            raise corrupt_image(self.subject(row), self.config_path, wrong)
        return read_image_file(path, self.subject(row), self.config_path)


def size_and_stamp(path: bytes) -> tuple[int, int]:
    """Return a file's bytes and `file_stamp`; (-1, 0) for a link without a target."""
    try:
        status = os.stat(path)
    except OSError:
        if os.path.islink(path):
            return -1, 0
        status = read_with_retries(
            lambda: os.stat(path), f"file '{printable(path)}'", Files.config_path
        )
    return status.st_size, file_stamp(status)


def find_root(root: str) -> str:
    """Return the folder `data.root`; DataError: no such folder."""
    root = os.path.expanduser(root)
    if os.path.isdir(root):
        return root
    if os.path.exists(root):
        raise DataError(
            Files.config_path,
            f"'{root}' is a file",
            "A folder of images",
            "Unpack the archive and give its folder",
        )
    path = os.path.abspath(root)
    raise DataError(
        Files.config_path,
        f"the folder '{root}' does not exist",
        did_you_mean(os.path.basename(path), folders(os.path.dirname(path))),
        "Check the path, or fetch the images first",
    )
