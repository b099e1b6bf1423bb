"""A folder of images whose reading waits, or takes more work on one rank."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from kd.core.contracts import Source
from kd.core.types import Decoded
from kd.parts.datasets import imagefolder


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(imagefolder.Options):
    """Keys of `imagefolder`, and what is wrong with it."""

    sleep_ms: float = 0.0
    """Wait of each image, as for a storage far away."""
    turns: int = 0
    """Images that wait, and then as many that do not, in turns; 0: all wait."""
    again: int = 0
    """How often an image is decoded beside the first time, as if it were larger."""
    rank: int = -1
    """The only rank that this happens to; -1: all."""


class Sabotaged:
    """A source that takes its time with training images."""

    def __init__(self, source: Source, options: Options, split: str) -> None:
        self.source = source
        self.options = options
        mine = options.rank in (-1, int(os.environ.get("RANK", "0")))
        self.active = mine and split == "train"
        self.decoded = 0
        self.classes = source.classes
        self.fingerprint = source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def decode(self, id: int) -> Decoded:
        """Decode an image, late."""
        if self.active:
            turn = self.decoded // self.options.turns if self.options.turns else 0
            self.decoded += 1
            if turn % 2 == 0:
                time.sleep(self.options.sleep_ms / 1000)
            for _ in range(self.options.again):
                self.source.decode(id)
        return self.source.decode(id)


def build(options: Options, split: str, classes: list[str] | None) -> Sabotaged:
    """Build the source of a split."""
    return Sabotaged(imagefolder.build(options, split, classes), options, split)
