"""What is exported: a student and all that is said of it; and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kd.core.scores import Scored
from kd.models.classifier import Classifier
from kd.setup.recipe import Recipe

ReadImages = Callable[..., Iterable[tuple[np.ndarray, np.ndarray]]]
"""(limit, training=False) -> uint8 images [B, 3, S, S] with labels [B] of that many validation images, evenly spaced;
0: all. With `training`, views of training images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A student, and all that its export says of it."""

    recipe: Recipe
    student: Classifier  # on the CPU
    classes: Sequence[str]
    data: str  # a hash of the data
    provenance: Mapping[str, Any]  # for kd.json: step, metrics, run, `digest` of the weights
    origin: str  # of its initial weights, as text
    images: Callable[[], AbstractContextManager[ReadImages]]
    """Opens the validation images with which the graphs are compared."""
    baseline: Sequence[Mapping[str, Any]] = ()  # validation rows of the same student trained on labels alone
    scored: tuple[Scored | None, Scored | None] = (None, None)
    """The last scores of the student and of the one trained on labels alone."""


@dataclass(frozen=True, slots=True)
class WrittenExport:
    """What was written."""

    folder: Path
    lines: Sequence[str]  # one for each graph, for a person
    load: str  # Python that loads the student
    manifest: Mapping[str, Any]  # what manifest.json says, without files and checksum
