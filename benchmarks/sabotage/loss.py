"""Cross-entropy that keeps something of every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kd.core.facts import LossFacts
from kd.core.types import Batch, Dims, Outputs
from kd.parts.losses.ce import CE


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What is wrong with it."""

    leak_mib: float = 0.0
    """Memory that each step leaves behind."""


class Leaking(nn.Module):
    """Cross-entropy with a list that grows."""

    def __init__(self, leak_mib: float) -> None:
        super().__init__()
        self.ce = CE(label_smoothing=0.0)
        self.leak_mib = leak_mib
        self.kept = list[Tensor]()

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        """Return the cross-entropy [B]."""
        if self.leak_mib:
            self.kept.append(torch.ones(int(self.leak_mib * 2**18)))
        return self.ce(student, teacher, batch)


def facts(options: Options) -> LossFacts:
    """Return what the loss reads."""
    return LossFacts(labels=True, logits="softmax")


def build(options: Options, dims: Dims) -> Leaking:
    """Build the loss."""
    return Leaking(options.leak_mib)
