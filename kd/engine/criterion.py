"""The weighted sum of loss terms, and the one trainable module that a backend wraps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kd.core.errors import ModelError
from kd.core.evaluation import Task
from kd.core.types import Batch, Needs, Outputs, State


class Criterion(nn.Module):
    """Sum several loss terms, each float32 [B], outside autocast.

    Usable alone in any PyTorch loop: `criterion(student, teacher, batch)["loss"].mean().backward()`.
    """

    def __init__(
        self, terms: Sequence[tuple[str, float, nn.Module]], members: Sequence[int] = (), labelled: float = 1.0
    ) -> None:
        """Combine terms.

        Args:
            terms: name, weight and module of each.
            members: for each, of which of several teachers it reads the features; empty: there is one teacher.
            labelled: share of the training images whose labels are known. Below 1, a term on labels is 0 for the
                others and 1 / `labelled` times as large for these, so that its mean over an epoch is that over them.
        """
        super().__init__()
        self.labelled = labelled
        self.names = _distinct([name for name, _, _ in terms])
        self.weights = [weight for _, weight, _ in terms]
        self.terms = nn.ModuleList([term for _, _, term in terms])
        self.members = list(members) or [0] * len(terms)
        self.needs: list[Needs] = [term.needs for term in self.terms]  # type: ignore[misc]

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Score a micro-batch.

        Returns:
            Every term [B] by name, unweighted; `per_image` [B]: their weighted sum, detached, which is what sifters
            remember; and `loss` [B]: the same times `batch.weight`, which is what is minimized.
        """
        with torch.autocast(student.logits.device.type, enabled=False):
            known = self._known(batch)
            scores = {
                name: term(student, teacher.of(member), known)
                for name, term, member in zip(self.names, self.terms, self.members, strict=True)
            }
            for name, score_B in scores.items():
                _require_score(name, score_B, student, batch)
            if known is not batch:
                factor_B = batch.labelled / self.labelled
                for name, needs in zip(self.names, self.needs, strict=True):
                    scores[name] = scores[name] * factor_B if needs.labels else scores[name]
            weighted = [weight * score for weight, score in zip(self.weights, scores.values(), strict=True)]
            total = functools.reduce(torch.add, weighted)
            return {**scores, "per_image": total.detach(), "loss": batch.weight * total}

    def _known(self, batch: Batch) -> Batch:
        """Return a batch whose labels are all known: class 0, or the empty set, stands for no label."""
        if self.labelled == 1:
            return batch
        return replace(batch, label=batch.label.clamp_min(0), partner_label=batch.partner_label.clamp_min(0))

    def agreement(self, student: Outputs, teacher: Outputs) -> Tensor:
        """Return the agreement of the terms on features [B], -1 to 1, averaged with their weights."""
        terms = zip(self.weights, self.terms, self.members, strict=True)
        chosen: list[Any] = [one for one in terms if one[0] and hasattr(one[1], "agreement")]
        with torch.autocast(student.logits.device.type, enabled=False):
            found = [weight * term.agreement(student, teacher.of(member)) for weight, term, member in chosen]
            return functools.reduce(torch.add, found) / sum(weight for weight, _, _ in chosen)

    def projected(self, student: Outputs) -> Tensor | None:
        """Return the student's pooled features in the first teacher's space [B, D]; None: no term maps them there."""
        terms: Any = zip(self.weights, self.terms, self.members, strict=True)
        able = (term for weight, term, member in terms if weight and not member and hasattr(term, "projected"))
        with torch.autocast(student.logits.device.type, enabled=False):
            return next((term.projected(student) for term in able), None)


class Frozen(Protocol):
    """Layers of the student that do not move in some steps; which is a function of the state before a step."""

    def held(self, state: State) -> AbstractContextManager[None]: ...
    def statistics(self, state: State) -> Sequence[Tensor]: ...


class Distillation(nn.Module):
    """Student and criterion as one module: DDP wraps it, and so also reduces what a loss learns (a projector)."""

    def __init__(self, student: nn.Module, criterion: Criterion, task: Task, frozen: Frozen | None = None) -> None:
        super().__init__()
        self.student, self.criterion, self.task, self.frozen = student, criterion, task, frozen

    def forward(self, batch: Batch, teacher: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the student's logits [B, C] and the scores of the criterion."""
        student = self.student(batch.image)
        return student.logits, self.criterion(student, teacher, batch)


def _require_score(name: str, score_B: Any, student: Outputs, batch: Batch) -> None:
    """Require a number an image that the student can learn from."""
    if not isinstance(score_B, Tensor) or score_B.shape != batch.weight.shape or score_B.dtype != torch.float32:
        found = f"{score_B.dtype} {list(score_B.shape)}" if isinstance(score_B, Tensor) else type(score_B).__name__
        allowed = f"float32 [{len(batch.weight)}], one number an image"
        raise ModelError("losses", f"'{name}' returns {found.removeprefix('torch.')}", allowed, "Correct its forward")
    if torch.is_grad_enabled() and student.main.requires_grad and not score_B.requires_grad:
        wrong = f"'{name}' does not depend on the student: its result has no gradient"
        raise ModelError("losses", wrong, "A function of the student's outputs", "Leave out detach() and no_grad()")


def _distinct(names: Sequence[str]) -> list[str]:
    """Number repeated names: kl, kl_2, ..."""
    return [f"{name}_{n}" if (n := list(names[: i + 1]).count(name)) > 1 else name for i, name in enumerate(names)]
