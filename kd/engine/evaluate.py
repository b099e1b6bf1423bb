"""Student, teacher and their agreement on the validation split.

Shape legend: B images of a batch, C classes, K calibration bins.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kd.contracts import Backend, Loader, Teacher
from kd.errors import DataError
from kd.types import Batch, Plan

NUM_BINS = 15


class Evaluator:
    """Score models on one validation split.

    The teacher does not change and neither do the validation images: its logits are kept from the first evaluation.
    """

    decides = "accuracy"
    """Which value says what the best checkpoint is; the larger the better."""

    def __init__(
        self,
        backend: Backend,
        loader: Loader,
        plan: Plan,
        teacher: Teacher,
        has_teacher: bool,
        num_classes: int,
        labelled: bool = True,
    ) -> None:
        """Prepare evaluations; nothing is computed yet.

        Args:
            backend: where they run.
            loader: of the validation images.
            plan: all of them.
            teacher: answers for them.
            has_teacher: False: labels alone.
            num_classes: C.
            labelled: whether validation images have labels.
        """
        self.labelled, self.decides = labelled, "accuracy" if labelled else "agreement"
        self.backend, self.loader, self.plan = backend, loader, plan
        self.teacher, self.has_teacher, self.num_classes = teacher, has_teacher, num_classes
        self.chance = 1 / max(1, num_classes)
        """The value that decides, of a model that guesses."""
        self._teacher_logits: list[Tensor] = []

    @torch.no_grad()
    def __call__(
        self, student: nn.Module, limit: int = 0, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Evaluate over all ranks.

        Args:
            student: maps uint8 images [B, 3, H, W] to Outputs.
            limit: stop after so many batches a rank; 0: the whole split.
            stop: asked before each batch, on all ranks alike; True gives the evaluation up.

        Returns:
            For the student `accuracy`, `top5`, `nll` (nats), `ece` (expected calibration error, 15 bins,
            arXiv:1706.04599), over the images with a label;
            with a teacher also `teacher_accuracy`, `teacher_top5`, `teacher_nll`, `teacher_ece`,
            `kl` (teacher || student, nats) and `agreement` (share of equal top-1). Without labels, these two and
            `agreement_ece`: the student's calibration error where the teacher's answer counts as right. Padding has
            weight 0. Empty if the evaluation was given up.

        Raises:
            DataError: no image has a weight, because none could be decoded.
        """
        was_training = student.training
        student.eval()
        keep = self.has_teacher and not self._teacher_logits and not limit
        rows: list[dict[str, Tensor]] = []
        for i, batch in enumerate(self.backend.put(self.loader.epoch(self.plan, view=0))):
            if limit and i >= limit:
                break
            if stop():
                student.train(was_training)
                return {}
            with self.backend.autocast():
                student_BC = student(batch.image).logits.float()
            teacher_BC = self._teacher_says(i, batch) if self.has_teacher else None
            if keep and teacher_BC is not None:
                self._teacher_logits.append(teacher_BC)
            rows.append(self._row(batch, student_BC, teacher_BC))  # not summed here: on XLA batch 1 would be special
            self.backend.end_step()
        student.train(was_training)
        return self._finish(rows)

    def of(self, teacher: Teacher) -> Evaluator:
        """Return the same for another teacher."""
        other = copy.copy(self)
        other.teacher, other._teacher_logits = teacher, []
        return other

    def _row(self, batch: Batch, student_BC: Tensor, teacher_BC: Tensor | None) -> dict[str, Tensor]:
        """Return what `_finish` needs of a batch, on the device: here sums over its images."""
        weight_B = batch.weight * batch.labelled
        scores = score(student_BC, batch.label, weight_B) if self.labelled else {}
        if teacher_BC is not None:
            of_teacher = score(teacher_BC, batch.label, weight_B) if self.labelled else {}
            scores.update({f"teacher_{name}": value for name, value in of_teacher.items()})
            if not self.labelled:
                scores["agreement_bins"] = score(student_BC, teacher_BC.argmax(-1), batch.weight)["bins"]
            scores.update(compare(student_BC, teacher_BC, batch.weight))
        scores["images"], scores["labelled"] = batch.weight.sum().double(), weight_B.sum().double()
        return scores

    def _teacher_says(self, number: int, batch: Batch) -> Tensor:
        """Return the teacher's logits [B, C] for a batch; on XLA a graph of its own, so that evaluations are alike."""
        if number < len(self._teacher_logits):
            return self._teacher_logits[number]
        teacher_BC = self.teacher(batch).logits.float()
        self.backend.end_step()
        return teacher_BC

    def _finish(self, rows: list[dict[str, Tensor]]) -> dict[str, float]:
        flat = torch.stack([torch.cat([value.flatten() for value in row.values()]) for row in rows]).sum(0)
        total = self.backend.reduce_sum(flat).cpu()  # once: every .item() below would wait for the device again
        parts = torch.split(total, [value.numel() for value in rows[0].values()])
        by_name = dict(zip(rows[0], parts, strict=True))
        images, labelled = by_name.pop("images"), by_name.pop("labelled")
        self._require(int(images), int(labelled))
        values = {}
        for name, value in by_name.items():
            count = images if name in ("kl", "agreement", "agreement_bins") else labelled
            if name.endswith("bins"):
                values[name.removesuffix("bins") + "ece"] = (_gap(value.view(2, NUM_BINS)) / count).item()
            else:
                values[name] = (value / count).item()
        return values

    def _require(self, images: int, labelled: int) -> None:
        """Require that so many images, of which so many have a label, can be scored.

        Raises:
            DataError: there is none.
        """
        if images == 0:
            wrong = "no image of the validation split could be decoded: there is nothing to evaluate"
            raise DataError("data", wrong, "At least one image", "Check the validation images; see data.on_corrupt")
        if self.labelled and labelled == 0:
            wrong = "no image of the validation split that could be decoded has a label"
            raise DataError("data.labels", wrong, "At least one", "Label some, or set data.labels=none")


def score(logits_BC: Tensor, label_B: Tensor, weight_B: Tensor) -> dict[str, Tensor]:
    """Return weighted sums, float64: accuracy, top5, nll and the calibration bins [2, K]."""
    weight_B = weight_B.double()
    log_prob_BC = logits_BC.log_softmax(-1)
    hits_B5 = logits_BC.topk(min(5, logits_BC.shape[1])).indices == label_B[:, None]
    confidence_B = log_prob_BC.amax(-1).exp().double()
    correct_B = hits_B5[:, 0].double()
    bin_B = (confidence_B * NUM_BINS).long().clamp(0, NUM_BINS - 1)  # 0 for NaN
    bins = torch.zeros(2, NUM_BINS, dtype=torch.float64, device=logits_BC.device)
    bins[0].index_add_(0, bin_B, weight_B * confidence_B)
    bins[1].index_add_(0, bin_B, weight_B * correct_B)
    nll_B = -log_prob_BC.gather(1, label_B.clamp_min(0)[:, None])[:, 0].double()  # -1: no label, and weight 0
    return {
        "accuracy": (weight_B * correct_B).sum(),
        "top5": (weight_B * hits_B5.any(-1)).sum(),
        "nll": (weight_B * nll_B).sum(),
        "bins": bins,
    }


def compare(student_BC: Tensor, teacher_BC: Tensor, weight_B: Tensor) -> dict[str, Tensor]:
    """Return weighted sums, float64: KL(teacher || student) at temperature 1 and top-1 agreement."""
    student_log_BC, teacher_log_BC = student_BC.log_softmax(-1), teacher_BC.log_softmax(-1)
    kl_B = (teacher_log_BC.exp() * (teacher_log_BC - student_log_BC)).sum(-1)
    same_B = student_BC.argmax(-1) == teacher_BC.argmax(-1)
    return {"kl": (weight_B * kl_B).double().sum(), "agreement": (weight_B * same_B).double().sum()}


def calibration_error(logits_NC: Tensor, label_N: Tensor) -> float:
    """Return the expected calibration error of N answers: 15 bins, arXiv:1706.04599."""
    return (_gap(score(logits_NC, label_N, torch.ones(len(label_N)))["bins"]) / len(label_N)).item()


def _gap(bins: Tensor) -> Tensor:
    """Return the sum over bins of |confidence - right answers|; `bins` is [2, K]."""
    return (bins[0] - bins[1]).abs().sum()
