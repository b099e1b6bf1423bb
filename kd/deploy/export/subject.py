"""What an export is made of: its options, the student and all that is said of it."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What `kd-export` writes beside the folder that timm loads."""

    onnx: bool = True
    """model.onnx, compared with PyTorch on validation images; without it the data is not needed."""
    int8: bool = False
    """A graph in int8 that loses at most `max_drop` of the accuracy, or of the cosine with PyTorch's vectors."""
    openvino: bool = False
    index: bool = False
    """Of an embedding student: the graphs return vectors in the teacher's space, to be searched in its index."""
    pt2: bool = False
    calibrate: bool = True
    """Divide the logits by one temperature, fitted on validation images, so that confidences are right on average.
    Where these are not read (no graph is written), nothing is divided."""
    compare: bool = False
    """Every graph that this machine can run, each measured; the fastest that loses at most `max_drop` is picked."""
    budget: float = 0.0
    """Of `compare`: milliseconds within which a client has its answer; the most accurate graph that fits is picked."""
    threads: int = 1
    """Of `compare`: on how many threads an image is computed for the pick."""
    defer: float = 0.0
    """The largest share of wrong answers among those that are sure: see `kd.deploy.export.defer`; 0: none says so."""
    defer_share: float = 0.0
    """Instead, the share of images whose answer is not sure."""
    max_drop: float = 0.01
    """A share: 0.01 is one point."""
    tolerance: float = 1e-3
    images: int = 2000
    """How many validation images are compared, evenly spaced; 0: all."""
    license: str = ""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    folder: Path
    lines: Sequence[str]  # one for each graph, for a person
    load: str  # Python that loads the student
    manifest: Mapping[str, Any]  # what manifest.json says, without files and checksum


Images = Callable[..., Iterable[tuple[np.ndarray, np.ndarray]]]
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
    images: Callable[[], AbstractContextManager[Images]]
    """Opens the validation images with which the graphs are compared."""
    baseline: Sequence[Mapping[str, Any]] = ()  # validation rows of the same student trained on labels alone
    scored: tuple[Scored | None, Scored | None] = (None, None)
    """The last scores of the student and of the one trained on labels alone."""
