"""The weighted sum of loss terms, and the one trainable module that a backend wraps."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kd.types import Batch, Outputs


class Criterion(nn.Module):
    """Sum several loss terms, each float32 [B], outside autocast.

    Usable alone in any PyTorch loop: `criterion(student, teacher, batch)["loss"].mean().backward()`.
    """

    def __init__(self, terms: Sequence[tuple[str, float, nn.Module]]) -> None:
        super().__init__()
        self.names = _distinct([name for name, _, _ in terms])
        self.weights = [weight for _, weight, _ in terms]
        self.terms = nn.ModuleList([term for _, _, term in terms])
        self.needs: frozenset[str] = frozenset().union(*(term.needs for term in self.terms))  # type: ignore[arg-type]

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Score a micro-batch.

        Returns:
            Every term [B] by name, unweighted; `per_image` [B]: their weighted sum, detached, which is what sifters
            remember; and `loss` [B]: the same times `batch.weight`, which is what is minimized.
        """
        with torch.autocast(student.logits.device.type, enabled=False):
            scores = {name: term(student, teacher, batch) for name, term in zip(self.names, self.terms, strict=True)}
            weighted = [weight * score for weight, score in zip(self.weights, scores.values(), strict=True)]
            total = functools.reduce(torch.add, weighted)
            return {**scores, "per_image": total.detach(), "loss": batch.weight * total}


class Distillation(nn.Module):
    """Student and criterion as one module: DDP wraps it, and so also reduces what a loss learns (a projector)."""

    def __init__(self, student: nn.Module, criterion: Criterion) -> None:
        super().__init__()
        self.student, self.criterion = student, criterion

    def forward(self, batch: Batch, teacher: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the student's logits [B, C] and the scores of the criterion."""
        student = self.student(batch.image)
        return student.logits, self.criterion(student, teacher, batch)


def _distinct(names: Sequence[str]) -> list[str]:
    """Number repeated names: kl, kl_2, ..."""
    return [f"{name}_{n}" if (n := list(names[: i + 1]).count(name)) > 1 else name for i, name in enumerate(names)]
