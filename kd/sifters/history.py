"""Skip, before they are decoded, images whose last distillation loss was low; refreshed, exact in number.

Legend: N images of the dataset, K kept this epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kd.errors import ConfigError
from kd.sifters._plan import Planned, count_kept, everything, generator, sees_everything, shuffled
from kd.types import Plan, SiftContext

NEVER = -1
CONFIRMATIONS = 3
"""Observations before a loss is believed to stay high."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How much is kept, and what is never given up."""

    keep: float = field(default=0.6, metadata={"above": 0.0, "high": 1.0})
    """Share of the images that a sifted epoch visits; exact up to one global batch."""
    floor: float = field(default=0.15, metadata={"above": 0.0, "high": 1.0})
    """Smallest probability with which an easy image is kept; its weight, 1/probability, is bounded by it."""
    warmup: int = field(default=1, metadata={"low": 1})
    """First epochs that visit everything."""
    anneal: float = field(default=0.125, metadata={"low": 0.0, "high": 1.0})
    """Last share of the run in which epochs visit everything."""
    refresh: int = field(default=4, metadata={"low": 1})
    """An image that was left out for so many epochs is visited, whatever its loss was."""
    reweight: bool = False
    """true: easy images weigh 1/probability, so that the plan's gradient is the full one in expectation. false: each
    image kept counts as one, which leans towards hard images; in our study it costs less accuracy (docs/sifting.md)."""
    balance: bool = False
    """Judge easy within each class, so that no class is sifted more than another."""
    noise_cap: float = field(default=0.0, metadata={"low": 0.0, "high": 0.5})
    """Share of images, those whose loss is highest and does not fall, that are treated as label noise: kept with
    probability `floor` and not weighted up. 0: none. This alone is biased, on purpose."""


class History(Planned):
    """Sift by an id-keyed table of the losses that training has already paid for.

    The lower part of the losses is easy: below their mean, or more where `keep` asks for it (InfoBatch's rule,
    arXiv:2303.04947, which at equal keep has a larger effective sample size than a probability that grows with the
    loss). Easy images are drawn without replacement with one probability p (weight 1/p with `reweight`); the others are
    all kept. With `reweight` the plan's weighted sum of gradients has the full sum as its expectation.

    The table is updated once an epoch and is the same on all ranks. Not handled: with mixup a loss belongs to two
    images; it is booked to the first.
    """

    def __init__(self, options: Options, context: SiftContext) -> None:
        super().__init__(context)
        self.options, self.keep = options, options.keep
        count = context.num_images
        self.epoch = NEVER
        self.loss_N = torch.full((count,), torch.nan)
        self.mean_N = torch.full((count,), torch.nan)
        self.seen_N = torch.full((count,), NEVER)
        self.observed_N = torch.zeros(count, dtype=torch.int64)
        self.visits_N = torch.zeros(count, dtype=torch.int64)
        self.fresh_N = torch.full((count,), torch.nan)
        self._arrived: list[tuple[Tensor, Tensor]] = []

    def observe(self, ids: Tensor, losses: Tensor) -> None:
        """Keep the losses where they are, on the device; they are read once an epoch."""
        self._arrived.append((ids, losses))

    def plan(self, epoch: int, progress: float) -> Plan:
        """Return what the losses up to the last epoch leave of this one."""
        new = epoch != self.epoch
        if new:
            self._gather()
            self._fold()
            self.epoch = epoch
        options = self.options
        if sees_everything(epoch, progress, options.warmup, options.anneal):
            made = everything(self.context, epoch)
        else:
            made = shuffled(self.context, epoch, *self._chosen(epoch))
        if new:
            self.visits_N[made.ids] += 1
        return made

    def _chosen(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the ids [K] and weights [K] of a sifted epoch."""
        count, kept = self.context.num_images, count_kept(self.context, self.options.keep)
        overdue_N = (self.seen_N == NEVER) | (epoch - self.seen_N > self.options.refresh)
        due = overdue_N.nonzero()[:, 0]
        due = due[torch.argsort(self.seen_N[due], stable=True)][:kept]  # the oldest first, where there is no room
        rest_N = torch.ones(count, dtype=torch.bool)
        rest_N[due] = False
        rest = rest_N.nonzero()[:, 0]
        room = kept - len(due)
        easy, hard, doubted = self._divided(rest, room)
        drawn_easy = room - len(hard) - len(doubted)
        draws = generator(self.context, "sift", epoch)
        picked = easy[torch.randperm(len(easy), generator=draws)[:drawn_easy]]
        weight = len(easy) / drawn_easy if drawn_easy and self.options.reweight else 1.0
        ids = torch.cat([due, hard, doubted, picked])
        weights = torch.cat([torch.ones(len(ids) - len(picked)), torch.full((len(picked),), weight)])
        return ids, weights

    def _divided(self, rest: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor]:
        """Split `rest` into easy images to draw from, hard ones that are all kept, and the doubted ones drawn."""
        doubted = self._doubted(rest)
        if len(doubted):
            rest = rest[~torch.isin(rest, doubted)]
            draws = generator(self.context, "doubt", self.epoch)
            few = min(round(self.options.floor * len(doubted)), room)
            doubted = doubted[torch.randperm(len(doubted), generator=draws)[:few]]
            room -= len(doubted)
        dropped = len(rest) - room
        if dropped <= 0:
            return rest[:0], rest, doubted
        score = self._within_class(rest) if self.options.balance else self.loss_N[rest]
        # equal losses take turns, or their places in the dataset would decide
        turn = torch.randperm(len(rest), generator=generator(self.context, "ties", self.epoch))
        order = rest[turn[torch.argsort(score[turn], stable=True)]]
        below_mean = int((score < score.mean()).sum())
        spared = max(1 - self.options.floor, 1e-9)
        num_easy = min(max(below_mean, math.ceil(dropped / spared)), len(rest))
        return order[:num_easy], order[num_easy:], doubted

    def _within_class(self, ids: Tensor) -> Tensor:
        """Return each image's percentile of loss within its class, 0 to 1."""
        label = self.context.labels()[ids]
        by_loss = torch.argsort(self.loss_N[ids], stable=True)
        order = by_loss[torch.argsort(label[by_loss], stable=True)]
        sizes = torch.bincount(label)
        starts = sizes.cumsum(0) - sizes
        percentile = torch.empty(len(ids))
        place = torch.arange(len(ids)) - starts[label[order]]
        percentile[order] = (place + 0.5) / sizes[label[order]]
        return percentile

    def _doubted(self, rest: Tensor) -> Tensor:
        """Return the images whose loss is among the highest and has not fallen below its own mean."""
        most = int(self.options.noise_cap * self.context.num_images)
        if not most:
            return rest[:0]
        stuck = (self.observed_N[rest] >= CONFIRMATIONS) & (self.loss_N[rest] >= self.mean_N[rest])
        highest = rest[torch.argsort(self.loss_N[rest], descending=True, stable=True)][:most]
        return highest[torch.isin(highest, rest[stuck])]

    def _gather(self) -> None:
        """Merge what this rank has observed with what the others have; every rank then knows the same."""
        count = self.context.num_images
        sums = torch.zeros(2, count)
        if self._arrived:
            ids = torch.cat([ids for ids, _ in self._arrived]).cpu()
            losses = torch.cat([losses for _, losses in self._arrived]).float().cpu()
            sums[0].index_put_((ids,), losses, accumulate=True)
            sums[1].index_put_((ids,), torch.ones(len(ids)), accumulate=True)
            self._arrived = []
        sums = self.context.reduce_sum(sums)
        seen = sums[1] > 0
        self.fresh_N[seen] = sums[0][seen] / sums[1][seen]

    def _fold(self) -> None:
        """Move the losses of the epoch that has ended into the table."""
        fresh = ~self.fresh_N.isnan()
        new = self.fresh_N[fresh]
        first = self.mean_N[fresh].isnan()
        self.mean_N[fresh] = torch.where(first, new, 0.5 * self.mean_N[fresh] + 0.5 * new)
        self.loss_N[fresh], self.seen_N[fresh] = new, self.epoch
        self.observed_N[fresh] += 1
        self.fresh_N.fill_(torch.nan)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the table, what the running epoch has added, and the epoch."""
        self._gather()
        return {"epoch": torch.tensor(self.epoch), **{name: getattr(self, f"{name}_N").clone() for name in _TABLE}}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned, in this world or in one of another size."""
        self.epoch, self._arrived = int(state["epoch"]), []
        for name in _TABLE:
            getattr(self, f"{name}_N").copy_(state[name])


_TABLE = ("loss", "mean", "seen", "observed", "visits", "fresh")


def build(options: Options, context: SiftContext) -> History:
    """Build the history sifter.

    Raises:
        ConfigError: `keep` is below `floor`.
    """
    if options.keep < options.floor:
        raise ConfigError(
            "sifter.keep",
            f"is {options.keep:g}, but an easy image is kept with probability sifter.floor={options.floor:g} at least",
            "keep >= floor",
            "Lower sifter.floor or raise sifter.keep",
        )
    return History(options, context)
