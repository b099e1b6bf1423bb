"""Averaged weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


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
