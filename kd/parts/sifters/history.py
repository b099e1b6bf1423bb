"""Skip images whose last distillation loss was low, before they are decoded.

Legend: N images of the dataset, K kept this epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kd.core.types import Plan, SiftContext
from kd.parts.sifters._plan import Planned, full_plan, generator, is_full_epoch, num_selected, shuffled

NEVER = -1  # in place of an epoch, which counts from 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How much of an epoch is kept, and with what limits."""

    keep: float = field(default=0.6, metadata={"above": 0.0, "high": 1.0})
    """Share of the images that a sifted epoch visits; exact up to one global batch."""
    floor: float = field(default=0.15, metadata={"above": 0.0, "high": 1.0})
    """Lowest probability of keeping an easy image."""
    warmup: int = field(default=1, metadata={"low": 1})
    """Number of first epochs that visit all images."""
    anneal: float = field(default=0.125, metadata={"low": 0.0, "high": 1.0})
    """Last share of the run, in which epochs visit all images."""
    refresh: int = field(default=4, metadata={"low": 1})
    """An image that was left out for this many epochs is visited, whatever its loss."""

    def __post_init__(self) -> None:
        if self.keep < self.floor:
            raise ValueError(f"keep={self.keep:g} is below floor={self.floor:g}, with which each easy image is kept")


class History(Planned):
    """Sift by a table of the losses that training has computed, by image id.

    Images whose loss is below the mean are easy, or more images where `keep` requires it (InfoBatch's rule,
    arXiv:2303.04947; at equal `keep` its effective sample size is larger than that of a probability that grows with
    the loss). Easy images are drawn without replacement with one probability p, all others are kept. Each image weighs
    1, which is biased towards hard images: weights of 1/p cost more accuracy in our study (benchmarks/LOG.md).

    The table is updated once per epoch and is equal on all ranks. Not handled: with mixup a loss belongs to two
    images. It is assigned to the first one.
    """

    def __init__(self, options: Options, context: SiftContext) -> None:
        super().__init__(context)
        self.options, self.keep = options, options.keep
        count = context.num_images
        self.epoch = NEVER
        self.loss_N = torch.full((count,), torch.nan)
        self.mean_N = torch.full((count,), torch.nan)
        self.seen_N = torch.full((count,), NEVER, dtype=torch.int32)
        self.visits_N = torch.zeros(count, dtype=torch.int32)
        self.fresh_N = torch.full((count,), torch.nan)
        self._pending: list[tuple[Tensor, Tensor]] = []

    def observe(self, ids: Tensor, losses: Tensor) -> None:
        """Keep the losses on the device; they are read once per epoch."""
        self._pending.append((ids, losses))

    def plan(self, epoch: int, progress: float) -> Plan:
        new = epoch != self.epoch
        if new:
            self._gather()
            self._fold()
            self.epoch = epoch
        options = self.options
        if is_full_epoch(epoch, progress, options.warmup, options.anneal):
            plan = full_plan(self.context, epoch)
        else:
            ids = self._sifted(epoch)
            plan = shuffled(self.context, epoch, ids, torch.ones(len(ids)))
        if new:
            self.visits_N[plan.ids] += 1
        return plan

    def _sifted(self, epoch: int) -> Tensor:
        count = num_selected(self.context, self.options.keep)
        overdue_N = (self.seen_N == NEVER) | (epoch - self.seen_N > self.options.refresh)
        overdue = overdue_N.nonzero()[:, 0]
        overdue = overdue[torch.argsort(self.seen_N[overdue], stable=True)][:count]  # oldest first, if not all fit
        rest_N = torch.ones(self.context.num_images, dtype=torch.bool)
        rest_N[overdue] = False
        room = count - len(overdue)
        easy, hard = self._split(rest_N.nonzero()[:, 0], room)
        draws = generator(self.context, "sift", epoch)
        drawn = easy[torch.randperm(len(easy), generator=draws)[: room - len(hard)]]
        return torch.cat([overdue, hard, drawn])

    def _split(self, rest: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Split `rest` into easy images to draw from and hard images to keep."""
        num_skipped = len(rest) - room
        if num_skipped <= 0:
            return rest[:0], rest
        score = self.loss_N[rest]
        # ties are broken at random; otherwise the order of the dataset would decide
        shuffle = torch.randperm(len(rest), generator=generator(self.context, "ties", self.epoch))
        order = rest[shuffle[torch.argsort(score[shuffle], stable=True)]]
        below_mean = int((score < score.mean()).sum())
        # at least so many that skipping num_skipped of them leaves each a probability of `floor`
        least = math.ceil(num_skipped / max(1 - self.options.floor, 1e-9))
        num_easy = min(max(below_mean, least), len(rest))
        return order[:num_easy], order[num_easy:]

    def _gather(self) -> None:
        """Average the observed losses over the ranks, so that the table is equal on all of them."""
        count = self.context.num_images
        sums = torch.zeros(2, count)
        if self._pending:
            ids = torch.cat([ids for ids, _ in self._pending]).cpu()
            losses = torch.cat([losses for _, losses in self._pending]).float().cpu()
            sums[0].index_put_((ids,), losses, accumulate=True)
            sums[1].index_put_((ids,), torch.ones(len(ids)), accumulate=True)
            self._pending = []
        sums = self.context.reduce_sum(sums)
        seen = sums[1] > 0
        self.fresh_N[seen] = sums[0][seen] / sums[1][seen]

    def _fold(self) -> None:
        fresh = ~self.fresh_N.isnan()
        new = self.fresh_N[fresh]
        first = self.mean_N[fresh].isnan()
        self.mean_N[fresh] = torch.where(first, new, 0.5 * self.mean_N[fresh] + 0.5 * new)
        self.loss_N[fresh], self.seen_N[fresh] = new, self.epoch
        self.fresh_N.fill_(torch.nan)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the table, the losses of the current epoch, and its number."""
        self._gather()
        return {"epoch": torch.tensor(self.epoch), **{name: getattr(self, f"{name}_N").clone() for name in _TABLE}}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned, on this number of ranks or another one."""
        self.epoch, self._pending = int(state["epoch"]), []
        for name in _TABLE:
            getattr(self, f"{name}_N").copy_(state[name])


_TABLE = ("loss", "mean", "seen", "visits", "fresh")


def build(options: Options, context: SiftContext) -> History:
    """Build the history sifter."""
    return History(options, context)
