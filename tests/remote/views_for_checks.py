"""Datasets of checks.py, in a module that the decoders import without pytest."""

from __future__ import annotations

import os
import time

from kd.core.errors import DataError
from kd.core.types import Sample
from kd.data.views import Views


class Slow:
    """Views whose images take a while, so that something can happen to a decoder that
    has one in hand.
    """

    def __init__(self, views: Views, seconds: float) -> None:
        self.views = views
        self.seconds = seconds
        self.classes = views.classes

    def __len__(self) -> int:
        return len(self.views)

    def load(self, id: int, view: int) -> Sample:
        time.sleep(self.seconds)
        return self.views.load(id, view)


class Absent:
    """Views of files that only the trainer has."""

    def __init__(self, views: Views) -> None:
        self.views = views
        self.trainer = os.getpid()
        self.classes = views.classes

    def __len__(self) -> int:
        return len(self.views)

    def load(self, id: int, view: int) -> Sample:
        if os.getpid() != self.trainer:
            raise DataError("data.root", "is not mounted here", "", "Mount it")
        return self.views.load(id, view)


class Stale(Absent):
    """Views of files of which other processes have an old copy."""

    def load(self, id: int, view: int) -> Sample:
        sample = self.views.load(id, view)
        return (
            sample
            if os.getpid() == self.trainer
            else sample._replace(pixels=255 - sample.pixels)
        )
