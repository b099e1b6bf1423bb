"""Other people's data as ours: any map-style dataset, any DataLoader."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from kd.errors import DataError
from kd.seeds import seed_from
from kd.types import Batch, Plan, Sample


class MapDataset:
    """A map-style dataset of (image, label) pairs. See `kd.contracts.Dataset`.

    Its transforms draw from Python's, NumPy's and torch's global generators: they are seeded from (seed, view, id)
    before an item is read and given back afterwards, so that a view is as pure here as with our own datasets.
    """

    def __init__(self, items: Any, seed: int) -> None:
        self.items, self.seed = items, seed
        self.classes: Sequence[str] = tuple(getattr(items, "classes", ()))

    def __len__(self) -> int:
        return len(self.items)

    def load(self, id: int, view: int) -> Sample:
        """Return item `id` as the view's seed makes it."""
        seed = seed_from(self.seed, "view", view, id)
        kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            image, label = self.items[id][:2]
        except (TypeError, ValueError) as error:
            raise DataError("train", f"item {id} is not (image, label): {error}", "", "Return pairs") from error
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])
            torch.set_rng_state(kept[2])
        if not isinstance(image, torch.Tensor):
            raise DataError(
                "train",
                f"image {id} is {type(image).__name__}",
                "A tensor is expected",
                "End the transform in a tensor",
            )
        return Sample(image, int(label), int(label), 1.0)


class BatchLoader:
    """A DataLoader of (images, labels) batches, taken as it comes. See `kd.contracts.Loader`.

    Not handled: ids. The order is the DataLoader's own, so there is nothing for a sifter with a memory to remember,
    and a resumed epoch sees another shuffle. A short last batch is dropped: shapes stay fixed.
    """

    def __init__(self, batches: Iterable[Any], batch_size: int) -> None:
        self.batches, self.batch_size = batches, batch_size
        self.unreadable: set[int] = set()

    def epoch(self, plan: Plan, view: int, start: int = 0) -> Iterator[Batch]:
        """Yield as many batches as the plan has room for."""
        for number, (image, label, *_) in enumerate(islice(self.batches, len(plan.ids) // self.batch_size)):
            if number >= start and len(label) == self.batch_size:
                first = number * self.batch_size
                yield Batch.of(image, label, torch.arange(first, first + self.batch_size))
