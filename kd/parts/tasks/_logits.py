"""Evaluate student and teacher on the validation split, for all tasks.

Shape legend: B images of a batch, C classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from kd.core.contracts import Backend, Teacher
from kd.core.errors import DataError
from kd.core.evaluation import Evaluation, Evaluator, Split
from kd.core.scores import Scores
from kd.core.types import Batch, Outputs

# bytes of a teacher's validation outputs kept for later evaluations
MOST_BYTES = 1 << 30


class Answers:
    """Caches a teacher's outputs for a validation split, which do not change."""

    def __init__(self, predict: Callable[[Batch], Outputs], backend: Backend) -> None:
        self.predict = predict
        self.backend = backend
        self._cached: list[Outputs] = []
        self._bytes = 0

    def __call__(self, number: int, batch: Batch) -> Outputs:
        """Return the outputs of the batch of this number.

        On XLA they have their own graph, so evaluations are equal.
        """
        if number < len(self._cached):
            return self._cached[number]
        outputs = self.predict(batch)
        self._bytes += outputs.logits.nbytes
        self._bytes += sum(tensor.nbytes for tensor in outputs.features.values())
        if self._bytes <= MOST_BYTES:
            self._cached.append(outputs)
        self.backend.end_step()
        return outputs


class LogitsEvaluator(Evaluator):
    """Scores models on one validation split. See `kd.core.evaluation.Evaluator`."""

    def __init__(self, setting: Evaluation, scores: Scores) -> None:
        self.backend = setting.backend
        self.val = setting.val
        self.loader = setting.val.loader
        self.teacher = setting.teacher
        self.labelled = setting.labelled
        self.selection_metric = scores.selection_metric(self.labelled).key
        self.partly = setting.partly
        self.chance = 1 / max(1, setting.num_classes)
        self._answers = Answers(_logits_of(self.teacher), self.backend)
        self._last: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def __call__(
        self, student: nn.Module, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        was_training = student.training
        student.eval()
        rows: list[dict[str, Tensor]] = []
        self._last = []
        for i, batch in enumerate(
            self.backend.put(self.loader.epoch(self.val.plan, view=0))
        ):
            if stop():
                student.train(was_training)
                return {}
            with self.backend.autocast():
                student_BC = student(batch.image).logits.float()
            teacher_BC = None
            if self.teacher is not None:
                teacher_BC = self._answers(i, batch).logits
            # Not summed here: on XLA batch 1 would be special.
            rows.append(self._row(batch, student_BC, teacher_BC))
            self._last.append(self._images(batch, student_BC, teacher_BC))
            self.backend.end_step()
        student.train(was_training)
        return self._finish(rows)

    def of(self, teacher: Teacher) -> LogitsEvaluator:
        evaluator = copy.copy(self)
        evaluator.teacher = teacher
        evaluator._answers = Answers(_logits_of(teacher), self.backend)
        evaluator._last = []
        return evaluator

    def _row(
        self, batch: Batch, student_BC: Tensor, teacher_BC: Tensor | None
    ) -> dict[str, Tensor]:
        """Return a batch's inputs for `_finish`, on the device."""
        raise NotImplementedError

    def _finish(self, rows: list[dict[str, Tensor]]) -> dict[str, float]:
        """Return the validation row on all ranks."""
        raise NotImplementedError

    def _images(
        self, batch: Batch, student_BC: Tensor, teacher_BC: Tensor | None
    ) -> dict[str, Tensor]:
        """Return further inputs of `samples`, [B, ...], on the device."""
        return {}


def _logits_of(teacher: Teacher | None) -> Callable[[Batch], Outputs]:
    """Return the teacher without features, which may be large."""

    # Not a method: a reference cycle would keep the workers of its loader alive after
    # the run.
    def logits_only(batch: Batch) -> Outputs:
        assert teacher is not None
        return Outputs(teacher(batch).logits.float())

    return logits_only


def gather_images(
    rows: Sequence[Mapping[str, Tensor]], split: Split, backend: Backend
) -> dict[str, Tensor]:
    """Return all ranks' values by name, [N, ...] on the CPU, in the split's order.

    Each row has `ids` and `seen`, both [B]. 0: there is no value.
    """
    ids, has_value = (
        torch.cat([row[name] for row in rows]) for name in ("ids", "seen")
    )
    split_ids_N = split.plan.ids[split.plan.weights > 0].to(ids.device)
    position = torch.searchsorted(split_ids_N, ids)
    values = {}
    for name in rows[0]:
        local = torch.cat([row[name] for row in rows])
        local = torch.where(has_value[:, None], local.view(len(local), -1).float(), 0.0)
        full = torch.zeros(len(split_ids_N), local.shape[1], device=local.device)
        full.index_add_(0, position, local)
        values[name] = backend.reduce_sum(full).cpu()
    return values


def require_images(split: Split, images: int, labelled: int | None = None) -> None:
    """Require at least one image, and at least one label if `labelled` is given."""
    if images == 0:
        wrong = f"no image of the {split.name} split could be decoded"
        remedy = f"Check the {split.name} images; see data.on_corrupt"
        raise DataError(
            "data",
            f"{wrong}: there is nothing to evaluate",
            "At least one image",
            remedy,
        )
    if labelled == 0:
        wrong = f"no image of the {split.name} split that could be decoded has a label"
        remedy = "Label some, or set data.labels=none"
        raise DataError("data.labels", wrong, "At least one", remedy)
