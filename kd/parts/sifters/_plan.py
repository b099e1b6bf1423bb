"""Plan epochs before images are loaded: all images, exact counts, random orders."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from kd.core.contracts import Score
from kd.core.seeds import seed_from
from kd.core.types import Batch, Costs, Plan, SiftContext


class Planned:
    """Decides in the plan; every loaded image is trained on and no image is scored.

    See `kd.core.contracts.Sifter`.
    """

    keep = 1.0
    """Share of the images that a sifted epoch visits."""

    def __init__(self, context: SiftContext, limits: Any = None) -> None:
        """`limits`: options with `keep`, `warmup` and `anneal`; None: keep all."""
        self.context = context
        self.limits = limits
        if limits is not None:
            self.keep = limits.keep

    def is_full(self, epoch: int, progress: float) -> bool:
        """Return whether an epoch visits all images.

        Those are the first `warmup` ones, and those that begin in the last share
        `anneal`.
        """
        limits = self.limits
        return limits is None or epoch < limits.warmup or progress >= 1 - limits.anneal

    def steps(self, epoch: int, progress: float) -> int:
        share = self.context.balance if self.is_full(epoch, progress) else self.keep
        images = num_selected(self.context, share) if share else self.context.num_images
        return images // self.context.batch_size

    def cost(self, costs: Costs) -> float:
        """Return `keep` times the full cost, since a skipped image is not loaded."""
        return self.keep * costs.per_image()

    def stream(
        self, batches: Iterable[Batch], score: Score, start: int
    ) -> Iterator[Batch]:
        yield from batches

    def first(self, start: int) -> int:
        return start

    def observe(self, ids: Tensor, losses: Tensor) -> None:
        """Do nothing: there is no state."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return an empty dict: the plans are functions of (seed, epoch)."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Do nothing: there is no state."""


def generator(context: SiftContext, purpose: str, epoch: int) -> torch.Generator:
    """Return a generator whose state is a function of (seed, purpose, epoch)."""
    return torch.Generator().manual_seed(seed_from(context.seed, purpose, epoch))


def full_plan(context: SiftContext, epoch: int) -> Plan:
    """Plan all images in a random order, or a balanced share of them.

    They are cut to a multiple of the global batch size. Each epoch drops other images,
    so no image is left out permanently. With several views per image, each view drops a
    fixed set, so after one epoch of a view the teacher's cache has all of its logits.
    """
    if context.balance:
        return balanced_plan(context, epoch)
    count = context.num_images
    views = context.views
    remainder = count % context.batch_size
    ids = torch.randperm(count, generator=generator(context, "order", epoch))
    if views > 1 and remainder:
        order = torch.randperm(count, generator=generator(context, "cut", 0))
        dropped = torch.arange(remainder) + epoch % views * remainder
        stays = torch.ones(count, dtype=torch.bool)
        stays[order[dropped % count]] = False
        ids = ids[stays[ids]]
    return Plan(ids=ids[: count - remainder], weights=torch.ones(count - remainder))


def balanced_plan(context: SiftContext, epoch: int) -> Plan:
    """Plan the share `context.balance` of the images, balanced over the classes.

    A class that has too few images for that gives all of them. No image is drawn twice:
    both would have the same pixels.
    """
    count = num_selected(context, context.balance)
    ids = torch.randperm(
        context.num_images, generator=generator(context, "subset", epoch)
    )
    ids = ids[torch.argsort(_rank_in_class(context.labels()[ids]), stable=True)]
    return shuffled(context, epoch, ids[:count], torch.ones(count))


def _rank_in_class(label_K: Tensor) -> Tensor:
    """Return for each image the number of earlier images with its label, int64 [K]."""
    by_class = torch.argsort(label_K, stable=True)
    sizes = torch.bincount(label_K)
    starts = sizes.cumsum(0) - sizes
    rank_K = torch.empty_like(by_class)
    rank_K[by_class] = torch.arange(len(label_K)) - starts[label_K[by_class]]
    return rank_K


def shuffled(context: SiftContext, epoch: int, ids: Tensor, weights: Tensor) -> Plan:
    """Return a plan of these images in a random order, a function of (seed, epoch)."""
    order = torch.randperm(len(ids), generator=generator(context, "order", epoch))
    return Plan(ids=ids[order], weights=weights[order])


def num_selected(context: SiftContext, keep: float) -> int:
    """Return the share `keep` of all images in whole global batches, at least one."""
    batches = context.num_images // context.batch_size
    target = round(keep * context.num_images / context.batch_size)
    return min(max(1, target), batches) * context.batch_size
