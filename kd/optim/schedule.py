"""The learning rate as a function of the share of the run that is done, sifted or not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up, then a cosine (arXiv:1608.03983, without restarts) or a constant.

    It has no state: `apply` sets the rate from the progress alone, so a resumed run needs nothing from a checkpoint.
    """

    lr: float
    """Peak learning rate."""
    warmup: float
    """Share of the run, 0 to 1."""
    min_lr: float
    """Final rate as a share of `lr`."""
    shape: str = "cosine"

    def factor(self, progress: float) -> float:
        """Return the share of the peak rate at `progress`, 0 to 1."""
        if progress < self.warmup:
            return progress / self.warmup
        if self.shape == "constant":
            return 1.0
        after = min(1.0, (progress - self.warmup) / max(1e-12, 1 - self.warmup))
        return self.min_lr + (1 - self.min_lr) * (1 + math.cos(math.pi * after)) / 2

    def apply(self, optimizer: torch.optim.Optimizer, progress: float) -> float:
        """Set and return the learning rate of all groups."""
        lr = self.lr * self.factor(progress)
        for group in optimizer.param_groups:
            group["lr"] = lr
        return lr
