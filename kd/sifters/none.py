"""Visit every image once an epoch, in a fresh order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kd.seeds import seed_from
from kd.types import Batch, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """No options."""


class Everything:
    """Plan a random permutation of all images, cut to a multiple of the global batch size.

    What is cut differs from epoch to epoch, so that no image is left out for good. Not handled: a dataset smaller
    than one batch; `build` of the run refuses it.
    """

    def __init__(self, num_images: int, batch_size: int, seed: int) -> None:
        self.num_images, self.batch_size, self.seed = num_images, batch_size, seed

    def plan(self, epoch: int) -> Plan:
        generator = torch.Generator().manual_seed(seed_from(self.seed, "order", epoch))
        visited = self.num_images // self.batch_size * self.batch_size
        ids = torch.randperm(self.num_images, generator=generator)[:visited]
        return Plan(ids=ids, weights=torch.ones(visited))

    def stream(self, batches: Iterable[Batch], score: Callable[[Batch], Tensor]) -> Iterator[Batch]:
        yield from batches

    def observe(self, ids: Tensor, losses: Tensor) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass


def build(options: Options, num_images: int, batch_size: int, seed: int) -> Everything:
    """Build the sifter that sifts nothing."""
    return Everything(num_images, batch_size, seed)
