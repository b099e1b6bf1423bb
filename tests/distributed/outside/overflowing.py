"""A loss from outside the repository: `kl`, but infinite for one image."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kd.core.facts import LossFacts
from kd.parts.losses import kl


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which image."""

    image: int = -1
    """Its id; -1: none."""


class Overflowing(kl.KL):
    """KL divergence."""

    def __init__(self, image: int) -> None:
        super().__init__(1.0)
        self.image = image

    def forward(self, student, teacher, batch):
        score_B = super().forward(student, teacher, batch)
        return score_B * torch.where(batch.ids == self.image, torch.inf, 1.0)


def facts(options) -> LossFacts:
    return LossFacts(teacher=True, logits="softmax")


def build(options, dims) -> Overflowing:
    return Overflowing(options.image)
