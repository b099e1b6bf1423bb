"""The weighted sum of loss terms, and the one trainable module that a backend wraps."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kd.core.errors import ModelError
from kd.core.evaluation import Task
from kd.core.facts import LossFacts
from kd.core.types import Batch, Outputs, State
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
        """Combine terms; `labelled` is the share of training images with a label."""
        # Below 1, a term on labels is 0 for unlabelled images and scaled by 1 /
        # `labelled` for the others. Its mean over an epoch then equals the mean over
        # labelled images.
        super().__init__()
        self.labelled = labelled
        self.all = tuple(terms)
        self.names = _distinct([term.name for term in terms])
        self.terms = nn.ModuleList([term.loss for term in terms])
        comparing = [
            term
            for term in terms
            if term.weight and not term.teacher and term.facts.agreement
        ]
        projecting = [term for term in comparing if term.facts.projects]
        # what `agreement` shows: the first term that projects to the first teacher,
        # else all on its features
        self.compared = projecting[:1] or comparing

    def forward(
        self, student: Outputs, teacher: Outputs, batch: Batch
    ) -> dict[str, Tensor]:
        """Return every term [B] by name, unweighted, `per_image` [B] and `loss` [B]."""
        # `per_image` is their weighted sum, detached, for sifters. `loss`, which is
        # minimized, is that sum times `batch.weight`.
        with torch.autocast(student.logits.device.type, enabled=False):
            scores = {}
            with_labels = (
                _with_placeholder_labels(batch) if self.labelled < 1 else batch
            )
            for name, term in zip(self.names, self.all, strict=True):
                score_B = term.loss(student, teacher.of(term.teacher), with_labels)
                _require_score(name, score_B, student, batch)
                scores[name] = score_B
                if term.facts.labels and self.labelled < 1:
                    scores[name] = score_B * (batch.labelled / self.labelled)
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
            weight = sum(term.weight for term in self.compared)
            return functools.reduce(torch.add, weighted) / weight

    def projected(self, student: Outputs) -> Tensor | None:
        """Return the student's pooled features in the first teacher's space [B, D].

        None if no term has a projector.
        """
        with torch.autocast(student.logits.device.type, enabled=False):
            for term in self.compared:
                if term.facts.projects:
                    return term.loss.projected(student)
        return None


class StudentWithLoss(nn.Module):
    """Join student and criterion, so that DDP reduces the parameters of both."""

    def __init__(
        self,
        student: nn.Module,
        criterion: Criterion,
        task: Task,
        frozen: Frozen | None = None,
        image_size: int = 0,
    ) -> None:
        super().__init__()
        self.student = student
        self.criterion = criterion
        self.task = task
        self.frozen = frozen
        # side of full views, pixels; 0: a batch's images are not resized
        self.image_size = image_size
        # names of trainable parameters that get no gradient
        self.unused: tuple[str, ...] = ()

    def forward(
        self, batch: Batch, teacher: Outputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with at_size(self.student, batch.image.shape[-1], self.image_size):
            student = self.student(batch.image)
        return student.logits, self.criterion(student, teacher, batch)

    def frozen_layers(self, state: State) -> AbstractContextManager[None]:
        """Hold the frozen layers in the step after `state`."""
        return nullcontext() if self.frozen is None else self.frozen.held(state)


@contextmanager
def at_size(model: Any, side: int, image_size: int) -> Iterator[None]:
    """Let a classifier accept images of `side` pixels in place of `image_size`."""
    input_size = getattr(model, "input_size", 0)
    if not input_size or not image_size or side == image_size:
        yield
        return
    model.input_size = round(input_size * side / image_size)
    try:
        yield
    finally:
        model.input_size = input_size


def _with_placeholder_labels(batch: Batch) -> Batch:
    """Return a batch in which class 0, or the empty set, stands for a missing label."""
    return replace(
        batch,
        label=batch.label.clamp_min(0),
        partner_label=batch.partner_label.clamp_min(0),
    )


def _require_score(name: str, score_B: Any, student: Outputs, batch: Batch) -> None:
    """Require a number per image that the student can learn from."""
    description = type(score_B).__name__
    fits = False
    if isinstance(score_B, Tensor):
        description = f"{score_B.dtype} {list(score_B.shape)}".removeprefix("torch.")
        fits = score_B.shape == batch.weight.shape and score_B.dtype == torch.float32
    if not fits:
        allowed = f"float32 [{len(batch.weight)}], one number per image"
        raise ModelError(
            "losses", f"'{name}' returns {description}", allowed, "Correct its forward"
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
    """Return the names with repeated ones numbered, such as kl, kl_2."""
    numbered = []
    for i, name in enumerate(names):
        repeats = names[:i].count(name)
        numbered.append(f"{name}_{repeats + 1}" if repeats else name)
    return numbered
