"""One label per image: the class with the largest probability of a softmax is the
prediction.

Shape legend: B images of a batch, N images of a split, C classes, K calibration bins or
teachers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kd.core.evaluation import Evaluation, Task
from kd.core.facts import NoOptions as Options
from kd.core.intervals import Samples
from kd.core.scores import Column, GraphScores, Scores
from kd.core.text import AS_TRAINED
from kd.core.types import Batch
from kd.parts.tasks._logits import LogitsEvaluator, gathered, require_images

NUM_BINS = 15  # bins of the calibration error, as in arXiv:1706.04599
LOWEST, HIGHEST = 0.01, 100.0  # range of a temperature
SCORES = Scores(
    own=(
        Column("accuracy", "accuracy"),
        Column("top5", "top-5"),
        Column("ece", "calibration error", smaller=True),
    ),
    pair=(
        Column("agreement", "agreement", meaning="same prediction as the teacher"),
        Column(
            "kl",
            "KL",
            "nats",
            "divergence of the student's probabilities from the teacher's",
            smaller=True,
        ),
        Column("agreement_ece", "calibration error against the teacher", smaller=True),
    ),
)


class SingleLabel(Task):
    """See `kd.core.evaluation.Task`."""

    name, logits, label, problem_type = (
        "single_label",
        "softmax",
        "class",
        "single_label_classification",
    )
    label_loss, scores, keeps_topk = "ce", SCORES, True

    def evaluator(self, setting: Evaluation) -> SingleLabelEvaluator:
        return SingleLabelEvaluator(setting, self.scores)

    def average(self, logits_KBC: Tensor, shares_K: Tensor) -> Tensor:
        """Return log of the averaged probabilities of K teachers (arXiv:1503.02531)."""
        return (logits_KBC.log_softmax(-1) + shares_K.log()[:, None, None]).logsumexp(0)

    def are_probabilities(self, answer_BC: Tensor) -> bool:
        """Return whether each row is non-negative and sums to 1."""
        return bool(
            (answer_BC >= 0).all()
            and ((answer_BC.double().sum(1) - 1).abs() < 1e-3).all()
        )

    def from_probabilities(self, answer_BC: Tensor) -> Tensor:
        return answer_BC.clamp_min(torch.finfo(torch.float32).tiny).log()

    def graph_scores(
        self, outputs: Tensor, reference: Tensor, label: Tensor
    ) -> GraphScores:
        """Count equal predictions, and correct ones of the labelled images; if none is
        labelled, equal ones decide.
        """
        answer_N, images, labelled = (
            outputs.argmax(1),
            len(outputs),
            int((label >= 0).sum()),
        )
        same, correct = (
            int((answer_N == reference.argmax(1)).sum()),
            int((answer_N == label).sum()),
        )
        facts: dict[str, float] = {
            "same_top1": same,
            **({"labelled": labelled} if labelled < images else {}),
        }
        summary = f"same top-1 on {same} of {images} validation images"
        if not labelled:
            return GraphScores(
                facts, same / max(1, images), AS_TRAINED, summary, images - same, images
            )
        facts |= {"correct": correct, "accuracy": correct / labelled}
        return GraphScores(
            facts, correct / labelled, "accuracy", summary, images - same, labelled
        )


def build(options: Options) -> SingleLabel:
    """Build the task."""
    return SingleLabel()


class SingleLabelEvaluator(LogitsEvaluator):
    """Scores models that predict one class.

    A row has for the student `accuracy`, `top5`, `nll` (nats), `ece` (expected
    calibration error, 15 bins, arXiv:1706.04599), over the images with a label; with a
    teacher also the teacher's under `teacher_KEY`, `kl` (teacher || student, nats) and
    `agreement` (share of equal top-1). Without labels: these two and `agreement_ece`,
    the student's calibration error with the teacher's prediction as label. Padding has
    weight 0.
    """

    _counted = 0  # images behind the selection metric of the last row

    def training(self, logits_BC: Tensor, batch: Batch) -> dict[str, Tensor]:
        if not self.labelled:
            return {}
        correct_B = (logits_BC.argmax(-1) == batch.label).float()
        return {
            "accuracy": correct_B,
            **({"labelled": (batch.label >= 0).float()} if self.partly else {}),
        }

    def standard_error(self, value: float) -> float:
        return math.sqrt(value * (1 - value) / self._counted) if self._counted else 0.0

    def _row(
        self, batch: Batch, student_BC: Tensor, teacher_BC: Tensor | None
    ) -> dict[str, Tensor]:
        weight_B = batch.weight * batch.labelled
        scores = score(student_BC, batch.label, weight_B) if self.labelled else {}
        if teacher_BC is not None:
            of_teacher = (
                score(teacher_BC, batch.label, weight_B) if self.labelled else {}
            )
            scores.update(
                {f"teacher_{name}": value for name, value in of_teacher.items()}
            )
            if not self.labelled:
                scores["agreement_bins"] = score(
                    student_BC, teacher_BC.argmax(-1), batch.weight
                )["bins"]
            scores.update(compare(student_BC, teacher_BC, batch.weight))
        scores["images"], scores["labelled"] = (
            batch.weight.sum().double(),
            weight_B.sum().double(),
        )
        return scores

    def _images(
        self, batch: Batch, student_BC: Tensor, teacher_BC: Tensor | None
    ) -> dict[str, Tensor]:
        found = {"ids": batch.ids, "seen": batch.weight > 0, "labelled": batch.labelled}
        for prefix, logits_BC in (("", student_BC), ("teacher_", teacher_BC)):
            if self.labelled and logits_BC is not None:
                hits_B5 = hits(logits_BC, batch.label)
                found |= {
                    f"{prefix}accuracy": hits_B5[:, 0],
                    f"{prefix}top5": hits_B5.any(-1),
                }
        if teacher_BC is not None:
            found["agreement"] = student_BC.argmax(-1) == teacher_BC.argmax(-1)
        return found

    def samples(self) -> dict[str, Samples]:
        found = gathered(self._last, self.val, self.backend)
        known = {name: value_N1[:, 0].numpy() > 0 for name, value_N1 in found.items()}
        seen, labelled = known.pop("seen"), known.pop("labelled")
        known.pop("ids")
        right = {
            key: one[seen if key == "agreement" else seen & labelled]
            for key, one in known.items()
        }
        return {
            key: Samples(float(one.mean()), right=one) for key, one in right.items()
        }

    def _finish(self, rows: list[dict[str, Tensor]]) -> dict[str, float]:
        flat = torch.stack(
            [torch.cat([value.flatten() for value in row.values()]) for row in rows]
        ).sum(0)
        total = self.backend.reduce_sum(
            flat
        ).cpu()  # one transfer: every .item() below would sync with the device
        parts = torch.split(total, [value.numel() for value in rows[0].values()])
        by_name = dict(zip(rows[0], parts, strict=True))
        images, labelled = by_name.pop("images"), by_name.pop("labelled")
        require_images(self.val, int(images), int(labelled) if self.labelled else None)
        self._counted = int(labelled if self.labelled else images)
        values = {}
        for name, value in by_name.items():
            count = (
                images if name in ("kl", "agreement", "agreement_bins") else labelled
            )
            if name.endswith("bins"):
                values[name.removesuffix("bins") + "ece"] = (
                    _gap(value.view(2, NUM_BINS)) / count
                ).item()
            else:
                values[name] = (value / count).item()
        return values


def score(logits_BC: Tensor, label_B: Tensor, weight_B: Tensor) -> dict[str, Tensor]:
    """Return weighted sums, float64: accuracy, top5, nll and the calibration bins [2,
    K].
    """
    weight_B = weight_B.double()
    log_prob_BC = logits_BC.log_softmax(-1)
    hits_B5 = hits(logits_BC, label_B)
    confidence_B = log_prob_BC.amax(-1).exp().double()
    correct_B = hits_B5[:, 0].double()
    bin_B = (confidence_B * NUM_BINS).long().clamp(0, NUM_BINS - 1)  # 0 for NaN
    bins = torch.zeros(2, NUM_BINS, dtype=torch.float64, device=logits_BC.device)
    bins[0].index_add_(0, bin_B, weight_B * confidence_B)
    bins[1].index_add_(0, bin_B, weight_B * correct_B)
    nll_B = -log_prob_BC.gather(1, label_B.clamp_min(0)[:, None])[
        :, 0
    ].double()  # -1: no label, and weight 0
    return {
        "accuracy": (weight_B * correct_B).sum(),
        "top5": (weight_B * hits_B5.any(-1)).sum(),
        "nll": (weight_B * nll_B).sum(),
        "bins": bins,
    }


def hits(logits_BC: Tensor, label_B: Tensor) -> Tensor:
    """Return whether the label has the largest logit, the second largest, ..., bool [B,
    5 or C].
    """
    return logits_BC.topk(min(5, logits_BC.shape[1])).indices == label_B[:, None]


def compare(
    student_BC: Tensor, teacher_BC: Tensor, weight_B: Tensor
) -> dict[str, Tensor]:
    """Return weighted sums, float64: KL(teacher || student) at temperature 1 and top-1
    agreement.
    """
    student_log_BC, teacher_log_BC = (
        student_BC.log_softmax(-1),
        teacher_BC.log_softmax(-1),
    )
    kl_B = (teacher_log_BC.exp() * (teacher_log_BC - student_log_BC)).sum(-1)
    same_B = student_BC.argmax(-1) == teacher_BC.argmax(-1)
    return {
        "kl": (weight_B * kl_B).double().sum(),
        "agreement": (weight_B * same_B).double().sum(),
    }


def calibration_error(logits_NC: Tensor, label_N: Tensor) -> float:
    """Return the expected calibration error of N predictions: 15 bins,
    arXiv:1706.04599.
    """
    return (
        _gap(score(logits_NC, label_N, torch.ones(len(label_N)))["bins"]) / len(label_N)
    ).item()


def temperature(logits_NC: Tensor, label_N: Tensor) -> float:
    """Return the T from LOWEST to HIGHEST with which softmax(logits / T) has the lowest
    negative log-likelihood.

    Temperature scaling of Guo et al. 2017 (arXiv:1706.04599), section 4.2; each label
    [N] is from 0 to C - 1.
    """
    logits_NC = logits_NC.double()
    logits_NC = logits_NC - logits_NC.gather(1, label_N[:, None])
    low, high = (
        1 / HIGHEST,
        1 / LOWEST,
    )  # bisection on 1 / T, in which the negative log-likelihood is convex
    for _ in range(60):
        factor = (low * high) ** 0.5
        slope = ((factor * logits_NC).softmax(1) * logits_NC).sum(1).mean()
        low, high = (factor, high) if slope < 0 else (low, factor)
    return (low * high) ** -0.5


def _gap(bins: Tensor) -> Tensor:
    """Return the sum over bins of |confidence - correct predictions|; `bins` is
    [2, K].
    """
    return (bins[0] - bins[1]).abs().sum()
