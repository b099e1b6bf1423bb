"""Parameter groups, the learning rate, averaged weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def groups(modules: Iterable[nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters into those that decay and those that do not.

    Vectors (biases, norms, layer scales) and what a timm model names in `no_weight_decay` (position embeddings, class
    and register tokens) do not decay.

    Returns:
        Two parameter groups for a torch optimizer; a group without parameters is left out, because
        ZeroRedundancyOptimizer refuses empty ones.
    """
    decayed, kept = [], []
    for module in modules:
        exempt = getattr(module, "no_weight_decay", set)()
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                (kept if parameter.ndim <= 1 or name in exempt else decayed).append(parameter)
    both = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in both if group["params"]]


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


class EMA:
    """Keep an exponential moving average of a module's parameters and buffers.

    average <- decay * average + (1 - decay) * weight, with the decay ramped up as (1 + step) / (10 + step) so that the
    first, random weights are forgotten. One fused foreach call a step; a float32 copy of the student in memory.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        # The parameters themselves, not state_dict(): ZeRO points their storage elsewhere later on.
        live = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._live = {name: live[name] for name in module.state_dict() if live[name].is_floating_point()}
        self.average = {name: tensor.detach().clone() for name, tensor in self._live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimizer step number `step`, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.average.values()), list(self._live.values()), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the average into the module for the duration of an evaluation."""
        with torch.no_grad():
            kept = {name: tensor.clone() for name, tensor in self._live.items()}
            self._copy(self.average)
        try:
            yield
        finally:
            with torch.no_grad():
                self._copy(kept)

    def apply(self) -> None:
        """Put the average into the module for good."""
        with torch.no_grad():
            self._copy(self.average)

    def _copy(self, tensors: dict[str, Tensor]) -> None:
        torch._foreach_copy_(list(self._live.values()), [tensors[name] for name in self._live])

    def load(self, average: dict[str, Tensor]) -> None:
        """Restore the average from a checkpoint."""
        with torch.no_grad():
            for name, tensor in self.average.items():
                tensor.copy_(average[name])
