"""The weighted sum of loss terms, and the one trainable module that a backend wraps."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kd.core.errors import ModelError
from kd.core.evaluation import Task
from kd.core.facts import LossFacts
from kd.core.types import Batch, Outputs
from kd.engine.optim import Frozen


@dataclass(frozen=True, slots=True)
class Term:
    """One loss of a criterion."""

    name: str
    weight: float
    loss: Any  # A `kd.core.contracts.Loss`
    facts: LossFacts
    teacher: int = 0  # number of the teacher whose features it reads


class Criterion(nn.Module):
    """Sum several loss terms, each float32 [B], outside autocast.

    Usable alone in any PyTorch loop: `criterion(student, teacher,
    batch)["loss"].mean().backward()`.
    """

    def __init__(self, terms: Sequence[Term], labelled: float = 1.0) -> None:
        """Combine terms. `labelled`: share of the training images that have a label."""
        # Below 1, a term on labels is 0 for unlabelled images and scaled by 1 /
        # `labelled` for the others. Its mean over an epoch then equals the mean over
        # labelled images.
        super().__init__()
        self.labelled = labelled
        self.all = tuple(terms)
        self.names = _distinct([term.name for term in terms])
        self.terms = nn.ModuleList([term.loss for term in terms])
        able = [
            term
            for term in terms
            if term.weight and not term.teacher and term.facts.agreement
        ]
        self.compared = [term for term in able if term.facts.projects][:1] or able
        """What `agreement` shows: the first term that projects to the first teacher,
        else all on its features.
        """

    def forward(
        self, student: Outputs, teacher: Outputs, batch: Batch
    ) -> dict[str, Tensor]:
        """Return every term [B] by name, unweighted, `per_image` [B] and `loss` [B]."""
        # `per_image` is their weighted sum, detached, for sifters. `loss`, which is
        # minimized, is that sum times `batch.weight`.
        with torch.autocast(student.logits.device.type, enabled=False):
            known = batch
            if (
                self.labelled < 1
            ):  # class 0 or the empty set stands in for a missing label
                labels = {
                    name: getattr(batch, name).clamp_min(0)
                    for name in ("label", "partner_label")
                }
                known = replace(batch, **labels)
            scores = {
                name: term.loss(student, teacher.of(term.teacher), known)
                for name, term in zip(self.names, self.all, strict=True)
            }
            for name, score_B in scores.items():
                _require_score(name, score_B, student, batch)
            if known is not batch:
                factor_B = batch.labelled / self.labelled
                for name, term in zip(self.names, self.all, strict=True):
                    scores[name] = (
                        scores[name] * factor_B if term.facts.labels else scores[name]
                    )
            weighted = [
                term.weight * score
                for term, score in zip(self.all, scores.values(), strict=True)
            ]
            total = functools.reduce(torch.add, weighted)
            return {**scores, "per_image": total.detach(), "loss": batch.weight * total}

    def agreement(self, student: Outputs, teacher: Outputs) -> Tensor:
        """Return the agreement with the first teacher [B], -1 to 1.

        It is the cosine of `projected` with the teacher's vectors. Without a projector:
        the weighted mean of what the terms on features compare.
        """
        with torch.autocast(student.logits.device.type, enabled=False):
            weighted = [
                term.weight * term.loss.agreement(student, teacher.of(0))
                for term in self.compared
            ]
            return functools.reduce(torch.add, weighted) / sum(
                term.weight for term in self.compared
            )

    def projected(self, student: Outputs) -> Tensor | None:
        """Return the student's pooled features in the first teacher's space [B, D];
        None if no term has a projector.
        """
        with torch.autocast(student.logits.device.type, enabled=False):
            return next(
                (
                    term.loss.projected(student)
                    for term in self.compared
                    if term.facts.projects
                ),
                None,
            )


class StudentWithLoss(nn.Module):
    """Student and criterion as one module, so DDP also reduces the losses' learned
    parameters.
    """

    def __init__(
        self,
        student: nn.Module,
        criterion: Criterion,
        task: Task,
        frozen: Frozen | None = None,
        image_size: int = 0,
    ) -> None:
        super().__init__()
        self.student, self.criterion, self.task, self.frozen = (
            student,
            criterion,
            task,
            frozen,
        )
        # side of full views, pixels; 0: a batch's images are not resized
        self.image_size = image_size
        self.unused: tuple[
            str, ...
        ] = ()  # names of trainable parameters that get no gradient

    def forward(
        self, batch: Batch, teacher: Outputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with at_size(self.student, batch.image.shape[-1], self.image_size):
            student = self.student(batch.image)
        return student.logits, self.criterion(student, teacher, batch)


@contextmanager
def at_size(model: Any, side: int, image_size: int) -> Iterator[None]:
    """Let a classifier accept smaller images of `side` pixels; images of `image_size`
    fill its input.
    """
    own = getattr(model, "input_size", 0)
    if not own or not image_size or side == image_size:
        yield
        return
    model.input_size = round(own * side / image_size)
    try:
        yield
    finally:
        model.input_size = own


def _require_score(name: str, score_B: Any, student: Outputs, batch: Batch) -> None:
    """Require a number per image that the student can learn from."""
    if (
        not isinstance(score_B, Tensor)
        or score_B.shape != batch.weight.shape
        or score_B.dtype != torch.float32
    ):
        found = (
            f"{score_B.dtype} {list(score_B.shape)}"
            if isinstance(score_B, Tensor)
            else type(score_B).__name__
        )
        allowed = f"float32 [{len(batch.weight)}], one number per image"
        raise ModelError(
            "losses",
            f"'{name}' returns {found.removeprefix('torch.')}",
            allowed,
            "Correct its forward",
        )
    if (
        torch.is_grad_enabled()
        and student.main.requires_grad
        and not score_B.requires_grad
    ):
        wrong = f"'{name}' does not depend on the student: its result has no gradient"
        raise ModelError(
            "losses",
            wrong,
            "A function of the student's outputs",
            "Leave out detach() and no_grad()",
        )


def _distinct(names: Sequence[str]) -> list[str]:
    """Number repeated names: kl, kl_2, ..."""
    return [
        f"{name}_{n}" if (n := list(names[: i + 1]).count(name)) > 1 else name
        for i, name in enumerate(names)
    ]
