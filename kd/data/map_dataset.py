"""Other people's data as ours: any map-style dataset, any DataLoader."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch

from kd.contracts import Source
from kd.errors import ConfigError, DataError
from kd.seeds import seed_from
from kd.types import Batch, DatasetFacts, Plan, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The dataset section of `kd.distill`, which hands its datasets over: `kind: kd.data.map_dataset`."""

    label: Literal["class", "set"] = "class"
    """What the label of an item is."""


def facts(options: Options) -> DatasetFacts:
    """Return what others must know of it."""
    return DatasetFacts(label=options.label)


def build(options: Options, split: str, classes: Sequence[str] | None, labels: str = "all") -> Source:
    """Refuse: there are no files to list.

    Raises:
        ConfigError: always.
    """
    remedy = "Choose one of `kd-parts datasets`, or call kd.distill from Python"
    raise ConfigError("data.kind", "is for kd.distill, which hands its datasets over", "Images as files", remedy)


class MapDataset:
    """A map-style dataset of (image, label) pairs, or of images alone. See `kd.contracts.Dataset`.

    Its transforms draw from Python's, NumPy's and torch's global generators: they are seeded from (seed, view, id)
    before an item is read and given back afterwards, so that a view is as pure here as with our own datasets.
    """

    def __init__(self, items: Any, seed: int, where: str = "train", labels: str = "all", num_classes: int = 0) -> None:
        """Wrap a dataset.

        Args:
            items: it.
            seed: of the views.
            where: what a person calls it, for messages.
            labels: "all", "some" (-1: none), "sets" (0 or 1 for each class) or "none" (what stands beside an image is
                not read).
            num_classes: labels must be below; 0: not known yet.
        """
        self.items, self.seed, self.where, self.labels, self.num_classes = items, seed, where, labels, num_classes
        self.classes: Sequence[str] = tuple(getattr(items, "classes", ()))

    def __len__(self) -> int:
        return len(self.items)

    def load(self, id: int, view: int) -> Sample:
        """Return item `id` as the view's seed makes it.

        Raises:
            DataError: it is no image, or has no label where it must have one.
        """
        seed = seed_from(self.seed, "view", view, id)
        kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            item = self.items[id]
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])
            torch.set_rng_state(kept[2])
        image, label = split_item(item, f"item {id}", self.where, self.labels)
        if not isinstance(image, torch.Tensor):
            raise DataError(
                self.where,
                f"image {id} is {type(image).__name__}",
                "A tensor is expected",
                "End the transform in a tensor",
            )
        try:
            value = np.asarray(label, np.int8) if self.labels == "sets" else int(label)
        except (TypeError, ValueError) as error:
            raise DataError(
                self.where, f"item {id} is not (image, label): {error}", "A label is a number", "Return pairs"
            ) from error
        check_labels(torch.as_tensor(value)[None], f"item {id}", self.where, self.labels, self.num_classes)
        return Sample(image, value, value, 1.0)


def split_item(item: Any, subject: str, where: str, labels: str) -> tuple[Any, Any]:
    """Return image and label of an item, or of a batch; without labels -1.

    Raises:
        DataError: it is an image alone, and labels are read.
    """
    parts = [*item] if isinstance(item, (tuple, list)) and item else [item]
    if labels == "none":
        return parts[0], -1
    if len(parts) < 2:
        raise DataError(
            where,
            f"{subject} is not (image, label): it is {type(item).__name__}",
            "Pairs; images alone go with labels='none'",
            "Return pairs, or pass labels='none'",
        )
    return parts[0], parts[1]


def check_labels(labels_B: torch.Tensor, subject: str, where: str, labels: str, num_classes: int) -> None:
    """Require labels to be classes, or -1 where some are missing, or sets of classes [B, C].

    Raises:
        DataError: naming the first that is none.
    """
    if labels == "none":
        return
    if labels == "sets":
        if labels_B.shape[1:] != (num_classes or labels_B.shape[-1],) or not ((labels_B == 0) | (labels_B == 1)).all():
            wrong = f"{subject} has labels of shape {list(labels_B.shape[1:])}, or other values than 0 and 1"
            raise DataError(where, wrong, f"{num_classes or 'As many'} numbers, 1 for each class that is there", "")
        return
    lowest = 0 if labels == "all" else -1
    value = next((one for one in labels_B.tolist() if one < lowest or (num_classes and one >= num_classes)), None)
    if value is not None:
        most = f" to {num_classes - 1}" if num_classes else " or above"
        remedy = "Pass labels='some' where -1 means that there is none" if value == -1 else "Correct the labels"
        raise DataError(where, f"{subject} has the label {value}", f"Whole numbers from {lowest}{most}", remedy)


class BatchLoader:
    """A DataLoader of (images, labels) batches, taken as it comes. See `kd.contracts.Loader`.

    Not handled: ids. The order is the DataLoader's own, so there is nothing for a sifter with a memory to remember,
    and a resumed epoch sees another shuffle. A short last batch is dropped: shapes stay fixed.
    """

    def __init__(
        self, batches: Iterable[Any], batch_size: int, where: str = "train", labels: str = "all", num_classes: int = 0
    ) -> None:
        """Wrap a DataLoader; the other arguments are those of a MapDataset."""
        self.batches, self.batch_size = batches, batch_size
        self.where, self.labels, self.num_classes = where, labels, num_classes
        self.unreadable: set[int] = set()

    def epoch(self, plan: Plan, view: int, start: int = 0) -> Iterator[Batch]:
        """Yield as many batches as the plan has room for.

        Raises:
            DataError: a batch is no images with labels.
        """
        for number, item in enumerate(islice(self.batches, len(plan.ids) // self.batch_size)):
            image, label = split_item(item, f"batch {number}", self.where, self.labels)
            if number >= start and len(image) == self.batch_size:
                label = torch.full((len(image),), -1) if self.labels == "none" else label
                check_labels(label, f"batch {number}", self.where, self.labels, self.num_classes)
                first = number * self.batch_size
                yield Batch.of(image, label, torch.arange(first, first + self.batch_size))
