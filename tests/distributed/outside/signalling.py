"""A folder of images from outside the repository, whose decoding can send a signal to
the process that trains.

KD_SIGNAL=SIGTERM:train:50 sends SIGTERM when this process decodes its 50th training
image, in the middle of a step; SIGINT:val:14 sends SIGINT in the middle of an
evaluation. KD_SIGNAL_RANK=1: only on that rank. With SIGSTOP, KD_SIGNAL_KILL=15: a
SIGKILL so many seconds later. KD_SLOW=0.01: seconds
that decoding a training image takes more.
"""

from __future__ import annotations

import os
import signal
import time

from kd.parts.datasets.imagefolder import Options
from kd.parts.datasets.imagefolder import build as build_folder

__all__ = ["Options", "build"]


class Signalling:
    """A source that counts what it decodes."""

    def __init__(self, source, split: str) -> None:
        self.source = source
        self.split = split
        self.decoded = 0
        self.classes = source.classes
        self.fingerprint = source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name):
        return getattr(self.source, name)

    def decode(self, id):
        self.decoded += 1
        name, split, count = os.environ.get("KD_SIGNAL", "::0").split(":")
        mine = os.environ.get("KD_SIGNAL_RANK", "") in ("", os.environ.get("RANK", "0"))
        if mine and split == self.split and self.decoded == int(count):
            if (
                name == "SIGSTOP" and os.fork() == 0
            ):  # the child ends its stopped parent
                time.sleep(float(os.environ["KD_SIGNAL_KILL"]))
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(0)
            os.kill(os.getpid(), signal.Signals[name])
        if self.split == "train":
            time.sleep(float(os.environ.get("KD_SLOW", "0")))
        return self.source.decode(id)


def build(options, split, classes) -> Signalling:
    return Signalling(build_folder(options, split, classes), split)
