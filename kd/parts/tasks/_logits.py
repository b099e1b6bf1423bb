"""Shared by tasks: the evaluation of student and teacher on the validation split.

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

MOST_BYTES = (
    1 << 30
)  # bytes of a teacher's validation outputs kept for later evaluations


class Answers:
    """Caches a teacher's outputs for the batches of a validation split, by number: they
    do not change.
    """

    def __init__(self, ask: Callable[[Batch], Outputs], backend: Backend) -> None:
        self.ask, self.backend = ask, backend
        self._kept: list[Outputs] = []
        self._bytes = 0

    def __call__(self, number: int, batch: Batch) -> Outputs:
        """Return the outputs of a batch; on XLA they have their own graph, so
        evaluations are equal.
        """
        if number < len(self._kept):
            return self._kept[number]
        outputs = self.ask(batch)
        self._bytes += sum(
            tensor.nbytes for tensor in (outputs.logits, *outputs.features.values())
        )
        if self._bytes <= MOST_BYTES:
            self._kept.append(outputs)
        self.backend.end_step()
        return outputs


class LogitsEvaluator(Evaluator):
    """Scores models on one validation split. See `kd.core.evaluation.Evaluator`."""

    def __init__(self, setting: Evaluation, scores: Scores) -> None:
        self.backend, self.val, self.loader = (
            setting.backend,
            setting.val,
            setting.val.loader,
        )
        self.teacher, self.num_classes, self.labelled = (
            setting.teacher,
            setting.num_classes,
            setting.labelled,
        )
        self.selection_metric = scores.selection_metric(self.labelled).key
        self.partly = setting.partly
        self.chance = 1 / max(1, self.num_classes)
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
            teacher_BC = (
                None if self.teacher is None else self._answers(i, batch).logits
            )
            rows.append(
                self._row(batch, student_BC, teacher_BC)
            )  # not summed here: on XLA batch 1 would be special
            self._last.append(self._images(batch, student_BC, teacher_BC))
            self.backend.end_step()
        student.train(was_training)
        return self._finish(rows)

    def of(self, teacher: Teacher) -> LogitsEvaluator:
        other = copy.copy(self)
        other.teacher, other._answers, other._last = (
            teacher,
            Answers(_logits_of(teacher), self.backend),
            [],
        )
        return other

    def _row(
        self, batch: Batch, student_BC: Tensor, teacher_BC: Tensor | None
    ) -> dict[str, Tensor]:
        """Return a batch's inputs for `_finish` (which returns the validation row on
        all ranks), on the device.
        """
        raise NotImplementedError

    def _finish(self, rows: list[dict[str, Tensor]]) -> dict[str, float]:
        raise NotImplementedError

    def _images(
        self, batch: Batch, student_BC: Tensor, teacher_BC: Tensor | None
    ) -> dict[str, Tensor]:
        """Return per-image inputs for `samples` beside `_row`, on the device,
        [B, ...].
        """
        return {}


def _logits_of(
    teacher: Teacher | None,
) -> Callable[[Batch], Outputs]:  # without features, which may be large
    # Not a method: a reference cycle would keep the workers of its loader alive after
    # the run.
    def ask(batch: Batch) -> Outputs:
        assert teacher is not None
        return Outputs(teacher(batch).logits.float())

    return ask


def gathered(
    rows: Sequence[Mapping[str, Tensor]], split: Split, backend: Backend
) -> dict[str, Tensor]:
    """Return values of all ranks, [N, ...] by name, in the order of the split, on the
    CPU; 0: no value.
    """
    # Each row has `ids` and `seen`, both [B].
    ids_N, seen_N = (torch.cat([row[name] for row in rows]) for name in ("ids", "seen"))
    own_N = split.plan.ids[split.plan.weights > 0].to(ids_N.device)
    place_N, found = torch.searchsorted(own_N, ids_N), {}
    for name in rows[0]:
        mine = torch.cat([row[name] for row in rows])
        mine = torch.where(seen_N[:, None], mine.view(len(mine), -1).float(), 0.0)
        full = torch.zeros(len(own_N), mine.shape[1], device=mine.device).index_add_(
            0, place_N, mine
        )
        found[name] = backend.reduce_sum(full).cpu()
    return found


def require_images(split: Split, images: int, labelled: int | None = None) -> None:
    """Require at least one image, and at least one label (None: no score reads
    labels).
    """
    if images == 0:
        wrong = (
            f"no image of the {split.name} split could be decoded: there is nothing to"
            " evaluate"
        )
        raise DataError(
            "data",
            wrong,
            "At least one image",
            f"Check the {split.name} images; see data.on_corrupt",
        )
    if labelled == 0:
        wrong = f"no image of the {split.name} split that could be decoded has a label"
        raise DataError(
            "data.labels", wrong, "At least one", "Label some, or set data.labels=none"
        )
