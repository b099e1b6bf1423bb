"""Images from outside the repository whose storage fails in the middle of a run, as
folders or as one shard a split.

KD_HARM=KIND:FILE begins when FILE, the rows of a run, is about half as long as it will
be. KIND is gone: the root folder is moved away; flaky: each third read fails; replaced:
a file gets other bytes; shortened: the training shard loses its second half.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kd.files import storage
from kd.parts.datasets import _decode, imagefolder, webdataset

storage.PAUSES = (0.0, 0.0)
VICTIM = "train/fig/03.jpg"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where the images lie."""

    root: str
    shards: bool = False
    """Read `train.tar` and `val.tar` in `root`."""


class Failing:
    """A source that harms its own storage, once."""

    reads = 0

    def __init__(self, source, root: Path, split: str) -> None:
        self.source = source
        self.root = root
        self.classes = source.classes
        self.fingerprint = source.fingerprint
        self.kind, _, rows = os.environ.get("KD_HARM", "").partition(":")
        self.rows = Path(rows)
        if (self.kind, split) == ("flaky", "train"):
            check = _decode.check_file_size  # called at each try to read a file
            _decode.check_file_size = lambda size, subject, config_path: self.flaky(
                check, size, subject, config_path
            )

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name):
        return getattr(self.source, name)

    def decode(self, id):
        if self.kind not in ("", "flaky") and self.begun():
            self.harm()
        return self.source.decode(id)

    def begun(self) -> bool:
        return self.rows.is_file() and self.rows.read_text().count('"train"') >= 6

    def flaky(self, check, size, subject, config_path):
        if self.begun():
            self.reads += 1
            if self.reads % 3 == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO), subject)
        check(size, subject, config_path)

    def harm(self) -> None:
        """Do it; another worker or rank may be faster."""
        kind = self.kind
        self.kind = ""
        with suppress(FileNotFoundError):
            if kind == "gone":
                self.root.rename(self.root.with_name("away"))
            elif kind == "replaced":
                (self.root / VICTIM).write_bytes(b"not an image")
            elif kind == "shortened":
                os.truncate(
                    self.root / "train.tar",
                    (self.root / "whole.tar").stat().st_size // 2,
                )


def build(options, split, classes) -> Failing:
    root = Path(options.root)
    if options.shards:
        options_of_shards = webdataset.Options(
            train=str(root / "train.tar"), val=str(root / "val.tar")
        )
        return Failing(webdataset.build(options_of_shards, split, classes), root, split)
    return Failing(
        imagefolder.build(imagefolder.Options(root=str(root)), split, classes),
        root,
        split,
    )
