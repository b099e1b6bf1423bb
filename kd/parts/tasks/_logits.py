"""What tasks with logits share: the evaluation of student and teacher on the validation split.

Shape legend: B images of a batch, C classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kd.core.contracts import Teacher
from kd.core.errors import DataError
from kd.core.evaluation import Evaluation, Evaluator
from kd.core.scores import Scores
from kd.core.types import Batch


class LogitsEvaluator(Evaluator):
    """Score models on one validation split. See `kd.core.evaluation.Evaluator`."""

    # The teacher does not change and neither do the validation images: its logits are kept from the first evaluation.

    def __init__(self, setting: Evaluation, scores: Scores) -> None:
        self.backend, self.loader, self.plan = setting.backend, setting.val.loader, setting.val.plan
        self.teacher, self.num_classes, self.labelled = setting.teacher, setting.num_classes, setting.labelled
        self.decides = scores.decides(self.labelled).key
        self.chance = 1 / max(1, self.num_classes)
        self._teacher_logits: list[Tensor] = []
        self._last: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def __call__(self, student: nn.Module, stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        was_training = student.training
        student.eval()
        rows: list[dict[str, Tensor]] = []
        self._last = []
        for i, batch in enumerate(self.backend.put(self.loader.epoch(self.plan, view=0))):
            if stop():
                student.train(was_training)
                return {}
            with self.backend.autocast():
                student_BC = student(batch.image).logits.float()
            teacher_BC = self._ask_teacher(i, batch)
            rows.append(self._row(batch, student_BC, teacher_BC))  # not summed here: on XLA batch 1 would be special
            self._last.append(self._images(batch, student_BC, teacher_BC))
            self.backend.end_step()
        student.train(was_training)
        return self._finish(rows)

    def of(self, teacher: Teacher) -> LogitsEvaluator:
        other = copy.copy(self)
        other.teacher, other._teacher_logits, other._last = teacher, [], []
        return other

    def _ask_teacher(self, number: int, batch: Batch) -> Tensor | None:
        """Return the teacher's logits [B, C] for a batch; on XLA a graph of its own, so that evaluations are alike."""
        if self.teacher is None:
            return None
        if number >= len(self._teacher_logits):
            self._teacher_logits.append(self.teacher(batch).logits.float())
            self.backend.end_step()
        return self._teacher_logits[number]

    def _row(self, batch: Batch, student_BC: Tensor, teacher_BC: Tensor | None) -> dict[str, Tensor]:
        """Return what `_finish`, which returns the validation row on all ranks, needs of a batch, on the device."""
        raise NotImplementedError

    def _finish(self, rows: list[dict[str, Tensor]]) -> dict[str, float]:
        raise NotImplementedError

    def _images(self, batch: Batch, student_BC: Tensor, teacher_BC: Tensor | None) -> dict[str, Tensor]:
        """Return what `samples` needs of each image of a batch beside `_row`, on the device, [B, ...]."""
        return {}

    def _gather(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return values of all ranks, [N, ...] by name, by image, on the CPU; 0 for an image that nobody saw."""
        # Each row has `ids` and `seen`, both [B].
        ids_N, seen_N = (torch.cat([row[name] for row in rows]) for name in ("ids", "seen"))
        found = {}
        for name in rows[0]:
            mine = torch.cat([row[name] for row in rows])
            mine = torch.where(seen_N[:, None], mine.view(len(mine), -1).float(), 0.0)
            full = torch.zeros(len(self.plan.ids), mine.shape[1], device=mine.device).index_add_(0, ids_N, mine)
            found[name] = self.backend.reduce_sum(full).cpu()
        return found


def require_images(images: int, labelled: int | None = None) -> None:
    """Require that so many images, of which so many have a label (None: no score reads labels), can be scored."""
    if images == 0:
        wrong = "no image of the validation split could be decoded: there is nothing to evaluate"
        raise DataError("data", wrong, "At least one image", "Check the validation images; see data.on_corrupt")
    if labelled == 0:
        wrong = "no image of the validation split that could be decoded has a label"
        raise DataError("data.labels", wrong, "At least one", "Label some, or set data.labels=none")
