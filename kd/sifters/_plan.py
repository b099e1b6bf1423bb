"""What sifters that decide before loading share: full epochs, exact counts, and nothing to do afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from kd.contracts import Score
from kd.seeds import seed_from
from kd.types import Batch, Costs, Plan, SiftContext


class Planned:
    """Decide in the plan: what was loaded is trained, and nothing is scored. See `kd.contracts.Sifter`."""

    keep = 1.0
    """Share of the images that a sifted epoch visits."""

    def __init__(self, context: SiftContext) -> None:
        self.context = context

    def cost(self, costs: Costs) -> float:
        """Return what is kept of a whole step: what is left out is neither loaded nor asked for."""
        return self.keep * costs.per_image()

    def stream(self, batches: Iterable[Batch], score: Score, start: int) -> Iterator[Batch]:
        """Pass the batches on."""
        yield from batches

    def first(self, start: int) -> int:
        """Return `start`: a step of the plan is a step of the optimizer."""
        return start

    def observe(self, ids: Tensor, losses: Tensor) -> None:
        """Nothing to remember."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing: the plans are functions of (seed, epoch)."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Nothing to load."""


def generator(context: SiftContext, purpose: str, epoch: int) -> torch.Generator:
    """Return a generator that is a function of (seed, purpose, epoch)."""
    return torch.Generator().manual_seed(seed_from(context.seed, purpose, epoch))


def everything(context: SiftContext, epoch: int) -> Plan:
    """Plan a random permutation of all images, cut to a multiple of the global batch size.

    What is cut differs from epoch to epoch, so that no image is left out for good. Where an image has several views it
    differs from view to view and is the same whenever a view comes back: after one epoch of a view a cache of the
    teacher's logits has all that this view will ever ask for.
    """
    count, views = context.num_images, context.views
    visited = count // context.batch_size * context.batch_size
    ids = torch.randperm(count, generator=generator(context, "order", epoch))
    if views > 1 and visited < count:
        order = torch.randperm(count, generator=generator(context, "cut", 0))
        spared = torch.arange(count - visited) + epoch % views * (count - visited)
        ids = ids[torch.isin(ids, order[spared % count], invert=True)]
    return Plan(ids=ids[:visited], weights=torch.ones(visited))


def shuffled(context: SiftContext, epoch: int, ids: Tensor, weights: Tensor) -> Plan:
    """Return a plan of chosen images in a random order that is a function of (seed, epoch)."""
    order = torch.randperm(len(ids), generator=generator(context, "order", epoch))
    return Plan(ids=ids[order], weights=weights[order])


def count_kept(context: SiftContext, keep: float) -> int:
    """Return the multiple of the global batch size that is nearest to the share `keep` of all images; at least one."""
    batches = context.num_images // context.batch_size
    wanted = round(keep * context.num_images / context.batch_size)
    return min(max(1, wanted), batches) * context.batch_size


def sees_everything(epoch: int, progress: float, warmup: int, anneal: float) -> bool:
    """Return whether an epoch is left whole: the first `warmup`, and those that begin in the last share `anneal`."""
    return epoch < warmup or progress >= 1 - anneal
