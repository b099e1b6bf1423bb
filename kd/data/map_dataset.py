"""Adapt any map-style dataset, or any DataLoader, for kd.distill."""

import hashlib
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch

from kd.core.contracts import Source
from kd.core.errors import ConfigError, DataError
from kd.core.facts import DatasetFacts
from kd.core.seeds import evenly_spaced, seed_from
from kd.core.types import Batch, Plan, Sample, Small

PROBES = 16  # items loaded for the fingerprint
TRIES = 3  # empty epochs in a row before a DataLoader counts as too short


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """This dataset section belongs to `kd.distill`, which passes dataset objects.

    Its `kind` is `kd.data.map_dataset`.
    """

    label: Literal["class", "set"] = "class"
    """Kind of an item's label."""
    images: str = ""
    """Type and shape of an image."""


def facts(options: Options) -> DatasetFacts:
    """Return its facts for other parts."""
    return DatasetFacts(label=options.label)


def build(
    options: Options, split: str, classes: Sequence[str] | None, labels: str = "all"
) -> Source:
    """Refuse: there are no files to list."""
    remedy = "Choose one of `kd-parts datasets`, or call kd.distill from Python"
    wrong = "is for kd.distill, which passes dataset objects"
    raise ConfigError("data.kind", wrong, "Images as files", remedy)


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of a dataset's items are read and checked."""

    config_path: str  # the data's name for messages, such as "train"
    # "all", "some" (-1: none), "sets" (0 or 1 for each class) or "none" (not read)
    kind: str
    num_classes: int  # labels must be smaller; 0: not known yet
    # what to do about a label -1
    unlabelled: str = "Pass labels='some' where -1 means no label"

    def split(self, item: Any, subject: str) -> tuple[Any, Any]:
        """Return image and label of an item or a batch; -1: labels are not read."""
        fields = [*item] if isinstance(item, (tuple, list)) and item else [item]
        if self.kind == "none":
            return fields[0], -1
        if len(fields) < 2:
            wrong = f"{subject} is not (image, label): it is {type(item).__name__}"
            allowed = "Pairs; images alone go with labels='none'"
            raise DataError(
                self.config_path, wrong, allowed, "Return pairs, or pass labels='none'"
            )
        return fields[0], fields[1]

    def check(self, labels: Any, subject: str) -> torch.Tensor:
        """Return labels as classes int64 [B], or as sets of classes int8 [B, C].

        -1 stands for a missing label.
        """
        config_path = self.config_path
        classes = self.num_classes
        try:
            labels_B = torch.as_tensor(labels)
        except (TypeError, ValueError, RuntimeError) as error:
            wrong = f"{subject} is not (image, label): {error}"
            raise DataError(
                config_path, wrong, "A label is a number", "Return pairs"
            ) from error
        if self.kind == "sets":
            shape = labels_B.shape[1:]
            binary = (labels_B == 0) | (labels_B == 1)
            if shape != (classes or labels_B.shape[-1],) or not binary.all():
                wrong = (
                    f"{subject} has labels of shape {list(shape)}, or other values than"
                    " 0 and 1"
                )
                count = classes or "As many"
                allowed = f"{count} numbers, 1 for each class in the image"
                raise DataError(config_path, wrong, allowed)
            return labels_B.to(torch.int8)
        if labels_B.numel() != len(labels_B):
            wrong = f"{subject} has a label of shape {list(labels_B.shape[1:])}"
            allowed = "A class number; sets of labels go with labels='sets'"
            raise DataError(config_path, wrong, allowed, "Pass class numbers")
        lowest = 0 if self.kind == "all" else -1
        limit = classes or 2**31
        for value in labels_B.flatten().tolist():
            if lowest <= value < limit and value == int(value):
                continue
            highest = f"to {classes - 1}" if classes else "or above"
            allowed = f"Whole numbers from {lowest} {highest}"
            remedy = "Correct the labels"
            if value == -1:
                remedy = self.unlabelled
            raise DataError(
                config_path, f"{subject} has the label {value:g}", allowed, remedy
            )
        return labels_B.flatten().long()


class MapDataset:
    """This dataset has (image, label) pairs, or images alone, by position.

    See `kd.core.contracts.Dataset`.
    """

    # Its transforms use the global generators of Python, NumPy and torch (CPU). They
    # are seeded from (seed, view, id) before an item is read and restored after it, so
    # a view is a pure function as in kd's own datasets.

    def __init__(
        self,
        items: Any,
        seed: int,
        config_path: str = "train",
        labels: str = "all",
        num_classes: int = 0,
    ) -> None:
        self.items = items
        self.seed = seed
        self.labels = Labels(config_path, labels, num_classes)
        self.classes: Sequence[str] = ()
        names = getattr(items, "classes", ())
        if isinstance(names, Collection):  # some datasets store a number there
            self.classes = tuple(names)
        self._shape: torch.Size | None = None

    def __len__(self) -> int:
        return len(self.items)

    def load(self, id: int, view: int) -> Sample:
        seed = seed_from(self.seed, "view", view, id)
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # torch.manual_seed formats three tracebacks: 0.1 to 1 ms per image
        torch.default_generator.manual_seed(seed)
        try:
            item = self.items[id]
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
        config_path = self.labels.config_path
        subject = f"item {id}"
        image, label = self.labels.split(item, subject)
        if not isinstance(image, torch.Tensor):
            wrong = f"image {id} is {type(image).__name__}"
            remedy = "End the transform in a tensor"
            raise DataError(config_path, wrong, "A tensor is expected", remedy)
        self._shape = self._shape or image.shape
        if image.shape != self._shape:
            wrong = (
                f"image {id} has the shape {list(image.shape)}, but an earlier one"
                f" {list(self._shape)}"
            )
            remedy = "Resize or crop them in the transform"
            raise DataError(config_path, wrong, "Images of one shape", remedy)
        if self.labels.kind == "none":
            return Sample(image, -1, -1, 1.0)
        labels = (
            label[None] if isinstance(label, (torch.Tensor, np.ndarray)) else [label]
        )
        checked = self.labels.check(labels, subject)[0]
        value = checked.numpy() if self.labels.kind == "sets" else int(checked)
        return Sample(image, value, value, 1.0)

    def fingerprint(self) -> str:
        """Return a hash of the length, all `targets` and `PROBES` items."""
        # Of an item that differs when it is loaded twice (own generator), only the
        # label is hashed.
        targets = getattr(self.items, "targets", None)
        if targets is not None:
            targets = [t.tolist() if hasattr(t, "tolist") else t for t in targets]
        sha = hashlib.sha256(f"{len(self)} {targets}".encode())
        for id in evenly_spaced(len(self), PROBES):
            sample = self.load(id, 0)
            again = self.load(id, 0)
            sha.update(str(np.asarray(sample.label).tolist()).encode())
            if torch.equal(sample.pixels, again.pixels):
                pixels = sample.pixels.detach().cpu().contiguous().flatten()
                sha.update(pixels.view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


class BatchLoader:
    """This loader passes on a DataLoader's batches (images, labels), in its order.

    See `kd.core.contracts.Loader`.
    """

    # Not handled: ids. The order is the DataLoader's, so sifters cannot remember
    # images, and a resumed epoch has another shuffle. A short last batch is dropped:
    # shapes stay fixed.

    def __init__(
        self,
        batches: Iterable[Any],
        batch_size: int,
        config_path: str = "train",
        labels: str = "all",
        num_classes: int = 0,
    ) -> None:
        self.batches = batches
        self.batch_size = batch_size
        self.labels = Labels(config_path, labels, num_classes)
        self.unreadable: set[int] = set()
        self._empty = 0  # epochs in a row without a batch

    def epoch(
        self, plan: Plan, view: int, start: int = 0, small: Small | None = None
    ) -> Iterator[Batch]:
        self._empty += 1
        steps = len(plan.ids) // self.batch_size
        for number, item in enumerate(islice(self.batches, steps)):
            image, label = self.labels.split(item, f"batch {number}")
            if number < start or len(image) != self.batch_size:
                continue
            if self.labels.kind == "none":
                label = torch.full((len(image),), -1)
            else:
                label = self.labels.check(label, f"batch {number}")
            self._empty = 0
            first = number * self.batch_size
            yield Batch.of(image, label, torch.arange(first, first + self.batch_size))
        if self._empty == TRIES:  # else the epoch would begin again and again
            wrong = (
                f"its DataLoader ends before the {start + 1}. whole batch of {steps}"
            )
            raise DataError(
                self.labels.config_path,
                wrong,
                "Whole batches",
                "Give its sampler a length, or pass the dataset",
            )
