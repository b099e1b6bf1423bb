"""A task meets the engine at these protocols: predictions and their scores.

`kd/core/contracts.py` has all others.

Shape legend: B images of a batch, C classes, K teachers, N images of a split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kd.core.contracts import Backend, Loader, Teacher
from kd.core.intervals import Samples
from kd.core.scores import GraphScores, Scores
from kd.core.types import Batch, Outputs, Plan


@dataclass(frozen=True, slots=True)
class Split:
    """A split has images in evaluation's view."""

    loader: Loader
    plan: Plan  # of ascending ids, padded with weight 0
    name: str = "validation"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`Task.evaluator` gets these inputs."""

    backend: Backend
    val: Split
    # outputs for validation images; None if no loss needs a teacher
    teacher: Teacher | None
    num_classes: int
    labelled: bool = True  # whether validation images have labels, all or some
    bank: Callable[[], Split] | None = None  # training images: the k-NN index
    # for training images, if outputs are looked up by id
    bank_teacher: Teacher | None = None
    # (student, teacher) -> cosine [B]
    agreement: Callable[[Outputs, Outputs], Tensor] | None = None
    # the student's vectors in the teacher's space
    projected: Callable[[Outputs], Tensor | None] | None = None
    members: int = 1  # number of teachers
    partly: bool = False  # whether only some training images have a label


class Evaluator(Protocol):
    """An evaluator scores student and teacher on the validation split.

    A task builds it.
    """

    loader: Loader
    # the key of the metric that chooses the checkpoint; larger is better
    selection_metric: str
    labelled: bool  # whether models are scored against labels
    chance: float  # that metric at chance level; 0: unknown

    def __call__(
        self, student: nn.Module, stop: Callable[[], bool] = ...
    ) -> dict[str, float]:
        """Return a validation row; see `kd.core.scores`.

        Args:
            student: the student in training.
            stop: called before each batch; if it returns True, the result is {}.
        """
        ...

    def of(self, teacher: Teacher) -> Evaluator:
        """Return the same for another teacher."""
        ...

    def standard_error(self, value: float) -> float:
        """Return the standard error of the selection metric; 0: unknown.

        Args:
            value: a value of that metric on these images.
        """
        return 0.0

    def training(self, logits_BC: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return scores [B] of a training batch beside the loss terms.

        With `labelled`, 1 for each image with a label, `accuracy` is logged as a share
        of those.

        Args:
            logits_BC: the student's logits.
            batch: the training batch on the device.
        """
        return {}


@runtime_checkable
class Sampled(Protocol):
    """This evaluator keeps the inputs of its last row.

    Evaluators without it get no confidence interval.
    """

    def samples(self) -> dict[str, Samples]:
        """Return the samples behind the scores of the last row, by key.

        All ranks must call it.
        """
        ...


class Task(Protocol):
    """A task defines a model's prediction and how it is scored and shown.

    A module `tasks/NAME.py` has `build(options) -> Task`.

    The data decides whether all, some or no images have labels, not the task. A task
    that derives from this class inherits the methods of a classification task.
    """

    name: str
    # activation of the logits, as in `LossFacts.logits`; "": an embedding model
    logits: str
    label: str  # kind of an image's label: "class" or "set"
    problem_type: str  # transformers' `problem_type`; "": no logits
    label_loss: str  # the loss for training on labels alone: a part of `losses/`
    scores: Scores
    # whether top-k logits and the mass of the rest are enough for its losses
    keeps_topk: bool

    def evaluator(self, setting: Evaluation) -> Evaluator: ...

    def average(self, logits_KBC: Tensor, shares_K: Tensor) -> Tensor:
        """Return the logits [B, C] of the averaged probabilities of K teachers.

        Args:
            logits_KBC: logits of each teacher.
            shares_K: weights of the teachers; they sum to 1.
        """
        ...

    def no_labels(self, images: int, num_classes: int) -> Tensor:
        """Return labels for images of noise: class 0, or the empty set."""
        return torch.zeros(images, dtype=torch.int64)

    def refuse(self, answer_BC: Tensor) -> str:
        """Return the reason to refuse a teacher's first outputs, or ""."""
        return ""

    def are_probabilities(self, answer_BC: Tensor) -> bool: ...

    def from_probabilities(self, answer_BC: Tensor) -> Tensor:
        """Return logits, float32 [B, C]."""
        ...

    def graph_scores(
        self, outputs: Tensor, reference: Tensor, label: Tensor
    ) -> GraphScores:
        """Compare a graph's outputs for N images with PyTorch's.

        Args:
            outputs: the graph's outputs, float [N, C].
            reference: PyTorch's outputs, float [N, C].
            label: the images' labels; -1 where unknown.
        """
        ...

    def thresholds(
        self, logits_NC: Tensor, label: Tensor, classes: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """Return each class's decision threshold, a probability, and its facts.

        Args:
            logits_NC: logits of the validation images.
            label: their labels.
            classes: class names in the order of the logits.

        Returns:
            Values by class name; {}: predict the class with the largest logit.
        """
        return {}


def least_score(chance: float) -> float:
    """Return the score that a fitted teacher exceeds; a score of 1 is always enough.

    It is twice the chance level, which a perfect teacher reaches whose classes 0 to 11
    are in the order of text.

    Args:
        chance: chance level, 0 to 1.
    """
    return min(max(0.5, chance), 2 * chance)
