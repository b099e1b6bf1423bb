"""Keep a table of training losses by image id, for sifters with a memory.

Legend: N images of the dataset, K images of some kind.
"""

import torch
from pydantic import PositiveInt
from torch import Tensor

from kd.core.keys import Fraction, Keys, PositiveFraction, keys
from kd.core.types import Plan, SiftContext
from kd.parts.sifters._plan import (
    Planned,
    full_plan,
    generator,
    num_selected,
    shuffled,
)

NEVER = -1  # in place of an epoch, which counts from 0


@keys
class Limits(Keys):
    """Share of an epoch to keep, and its limits."""

    keep: PositiveFraction = 0.6
    """Share of the images that a sifted epoch visits; exact up to one global batch."""
    warmup: PositiveInt = 1
    """Number of first epochs that visit all images."""
    anneal: Fraction = 0.125
    """Last share of the run with full epochs."""
    refresh: PositiveInt = 4
    """An image skipped for this many epochs is then visited, independent of
    its score.
    """


class Remembering(Planned):
    """Visits unknown images and those skipped for too long.

    `choose` selects among the others. The table is updated once per epoch and is equal
    on all ranks. Not handled: with mixup a loss belongs to two images but is assigned
    to the first.
    """

    def __init__(self, limits: Limits, context: SiftContext) -> None:
        super().__init__(context, limits)
        count = context.num_images
        self.epoch = NEVER
        self.loss_N = torch.full((count,), torch.nan)
        self.seen_N = torch.full((count,), NEVER, dtype=torch.int32)
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
        if Planned.is_full(self, epoch, progress):
            return full_plan(self.context, epoch)
        if new:
            self.look()
        return self._sifted(epoch)

    def look(self) -> None:
        """Read further inputs for the choice of a new epoch. All ranks must call it."""

    def unknown(self) -> Tensor:
        """Return the images without a known loss, bool [N]."""
        return self.seen_N == NEVER

    def choose(self, candidates: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Choose `count` of the ids `candidates`; return them and their weights."""
        raise NotImplementedError

    def _sifted(self, epoch: int) -> Plan:
        size = self.context.batch_size
        unknown_N = self.unknown()
        count = max(
            num_selected(self.context, self.keep), int(unknown_N.sum()) // size * size
        )
        overdue_N = unknown_N | (epoch - self.seen_N > self.limits.refresh)
        overdue = overdue_N.nonzero()[:, 0]
        # oldest first, if not all fit
        overdue = overdue[torch.argsort(self.seen_N[overdue], stable=True)][:count]
        candidate_N = torch.ones(self.context.num_images, dtype=torch.bool)
        candidate_N[overdue] = False
        chosen, weights = self.choose(candidate_N.nonzero()[:, 0], count - len(overdue))
        weights = torch.cat([torch.ones(len(overdue)), weights])
        ids = torch.cat([overdue, chosen])
        return shuffled(self.context, epoch, ids, weights / weights.mean())

    def ascending(self, score_K: Tensor) -> Tensor:
        """Return positions sorted by score; ties are broken at random.

        Otherwise the dataset's order would decide.
        """
        shuffle = torch.randperm(
            len(score_K), generator=generator(self.context, "ties", self.epoch)
        )
        return shuffle[torch.argsort(score_K[shuffle], stable=True)]

    def _gather(self) -> None:
        """Average the observed losses over the ranks, which then have equal tables."""
        sums = torch.zeros(2, self.context.num_images)
        if self._pending:
            ids = torch.cat([ids for ids, _ in self._pending]).cpu()
            losses = torch.cat([losses for _, losses in self._pending]).float().cpu()
            sums[0].index_put_((ids,), losses, accumulate=True)
            sums[1].index_put_((ids,), torch.ones(len(ids)), accumulate=True)
            self._pending = []
        sums = self.context.reduce_sum(sums)
        observed = sums[1] > 0
        self.fresh_N[observed] = sums[0][observed] / sums[1][observed]

    def _fold(self) -> None:
        fresh = ~self.fresh_N.isnan()
        self.loss_N[fresh] = self.fresh_N[fresh]
        self.seen_N[fresh] = self.epoch
        self.fresh_N.fill_(torch.nan)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the table, the losses of the current epoch, and its number."""
        self._gather()
        return {
            "epoch": torch.tensor(self.epoch),
            **{name: getattr(self, f"{name}_N").clone() for name in _TABLE},
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned, on this number of ranks or another one."""
        self.epoch = int(state["epoch"])
        self._pending = []
        for name in _TABLE:
            getattr(self, f"{name}_N").copy_(state[name])


_TABLE = ("loss", "seen", "fresh")
