"""Predict one label per image, the class with a softmax's largest probability.

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
from kd.parts.tasks._logits import LogitsEvaluator, gather_images, require_images

NUM_BINS = 15  # bins of the calibration error, as in arXiv:1706.04599
LOWEST = 0.01  # smallest temperature
HIGHEST = 100.0  # largest temperature
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

    name = "single_label"
    logits = "softmax"
    label = "class"
    problem_type = "single_label_classification"
    label_loss = "ce"
    scores = SCORES
    keeps_topk = True

    def evaluator(self, setting: Evaluation) -> SingleLabelEvaluator:
        return SingleLabelEvaluator(setting, self.scores)

    def average(self, logits_KBC: Tensor, shares_K: Tensor) -> Tensor:
        """Return the log of K teachers' averaged probabilities (arXiv:1503.02531)."""
        return (logits_KBC.log_softmax(-1) + shares_K.log()[:, None, None]).logsumexp(0)

    def are_probabilities(self, answer_BC: Tensor) -> bool:
        """Return whether each row is non-negative and sums to 1."""
        distance_B = (answer_BC.double().sum(1) - 1).abs()
        return bool((answer_BC >= 0).all() and (distance_B < 1e-3).all())

    def from_probabilities(self, answer_BC: Tensor) -> Tensor:
        return answer_BC.clamp_min(torch.finfo(torch.float32).tiny).log()

    def graph_scores(
        self, outputs: Tensor, reference: Tensor, label: Tensor
    ) -> GraphScores:
        """Count equal predictions, and correct ones of the labelled images.

        Without labelled images the equal predictions decide.
        """
        answer_N = outputs.argmax(1)
        images = len(outputs)
        labelled = int((label >= 0).sum())
        same = int((answer_N == reference.argmax(1)).sum())
        facts: dict[str, float] = {"same_top1": same}
        if labelled < images:
            facts["labelled"] = labelled
        value = same / max(1, images)
        title = AS_TRAINED
        if labelled:
            facts["correct"] = int((answer_N == label).sum())
            value = facts["correct"] / labelled
            facts["accuracy"] = value
            title = "accuracy"
        summary = f"same top-1 on {same} of {images} validation images"
        return GraphScores(
            facts, value, title, summary, images - same, labelled or images
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

    _images_scored = 0  # images behind the selection metric of the last row

    def training(self, logits_BC: Tensor, batch: Batch) -> dict[str, Tensor]:
        if not self.labelled:
            return {}
        scores = {"accuracy": (logits_BC.argmax(-1) == batch.label).float()}
        if self.partly:
            scores["labelled"] = (batch.label >= 0).float()
        return scores

    def standard_error(self, value: float) -> float:
        images = self._images_scored
        return math.sqrt(value * (1 - value) / images) if images else 0.0

    def _row(
        self, batch: Batch, student_BC: Tensor, teacher_BC: Tensor | None
    ) -> dict[str, Tensor]:
        weight_B = batch.weight * batch.labelled
        scores: dict[str, Tensor] = {}
        for prefix, logits_BC in (("", student_BC), ("teacher_", teacher_BC)):
            if self.labelled and logits_BC is not None:
                for name, value in score(logits_BC, batch.label, weight_B).items():
                    scores[prefix + name] = value
        if teacher_BC is not None:
            if not self.labelled:
                label_B = teacher_BC.argmax(-1)
                bins = score(student_BC, label_B, batch.weight)["bins"]
                scores["agreement_bins"] = bins
            scores |= compare(student_BC, teacher_BC, batch.weight)
        scores["images"] = batch.weight.sum().double()
        scores["labelled"] = weight_B.sum().double()
        return scores

    def _images(
        self, batch: Batch, student_BC: Tensor, teacher_BC: Tensor | None
    ) -> dict[str, Tensor]:
        row = {"ids": batch.ids, "seen": batch.weight > 0, "labelled": batch.labelled}
        for prefix, logits_BC in (("", student_BC), ("teacher_", teacher_BC)):
            if self.labelled and logits_BC is not None:
                hits_B5 = hits(logits_BC, batch.label)
                row[f"{prefix}accuracy"] = hits_B5[:, 0]
                row[f"{prefix}top5"] = hits_B5.any(-1)
        if teacher_BC is not None:
            row["agreement"] = student_BC.argmax(-1) == teacher_BC.argmax(-1)
        return row

    def samples(self) -> dict[str, Samples]:
        gathered = gather_images(self._last, self.val, self.backend)
        del gathered["ids"]
        right = {name: value[:, 0].numpy() > 0 for name, value in gathered.items()}
        decoded = right.pop("seen")
        labelled = decoded & right.pop("labelled")
        samples = {}
        for key, right_N in right.items():
            right_N = right_N[decoded if key == "agreement" else labelled]
            samples[key] = Samples(float(right_N.mean()), right=right_N)
        return samples

    def _finish(self, rows: list[dict[str, Tensor]]) -> dict[str, float]:
        flat = torch.stack(
            [torch.cat([value.flatten() for value in row.values()]) for row in rows]
        ).sum(0)
        # One transfer: every .item() below would sync with the device.
        total = self.backend.reduce_sum(flat).cpu()
        sizes = [value.numel() for value in rows[0].values()]
        sums = dict(zip(rows[0], torch.split(total, sizes), strict=True))
        images = sums.pop("images")
        labelled = sums.pop("labelled")
        require_images(self.val, int(images), int(labelled) if self.labelled else None)
        self._images_scored = int(labelled if self.labelled else images)
        values = {}
        for name, value in sums.items():
            if name.endswith("bins"):
                name = name.removesuffix("bins") + "ece"
                value = _gap(value.view(2, NUM_BINS))
            pair = name in ("kl", "agreement", "agreement_ece")
            values[name] = (value / (images if pair else labelled)).item()
        return values


def score(logits_BC: Tensor, label_B: Tensor, weight_B: Tensor) -> dict[str, Tensor]:
    """Return weighted sums, float64: accuracy, top5, nll and the bins [2, K]."""
    weight_B = weight_B.double()
    log_prob_BC = logits_BC.log_softmax(-1)
    hits_B5 = hits(logits_BC, label_B)
    confidence_B = log_prob_BC.amax(-1).exp().double()
    correct_B = hits_B5[:, 0].double()
    bin_B = (confidence_B * NUM_BINS).long().clamp(0, NUM_BINS - 1)  # 0 for NaN
    bins = torch.zeros(2, NUM_BINS, dtype=torch.float64, device=logits_BC.device)
    bins[0].index_add_(0, bin_B, weight_B * confidence_B)
    bins[1].index_add_(0, bin_B, weight_B * correct_B)
    # A label of -1, no label, has weight 0.
    log_prob_B1 = log_prob_BC.gather(1, label_B.clamp_min(0)[:, None])
    return {
        "accuracy": (weight_B * correct_B).sum(),
        "top5": (weight_B * hits_B5.any(-1)).sum(),
        "nll": (weight_B * -log_prob_B1[:, 0].double()).sum(),
        "bins": bins,
    }


def hits(logits_BC: Tensor, label_B: Tensor) -> Tensor:
    """Return whether the label has the largest logit, the second, ..., [B, 5 or C]."""
    return logits_BC.topk(min(5, logits_BC.shape[1])).indices == label_B[:, None]


def compare(
    student_BC: Tensor, teacher_BC: Tensor, weight_B: Tensor
) -> dict[str, Tensor]:
    """Return weighted sums, float64, of KL(teacher || student) and top-1 agreement."""
    student_log_BC = student_BC.log_softmax(-1)
    teacher_log_BC = teacher_BC.log_softmax(-1)
    kl_B = (teacher_log_BC.exp() * (teacher_log_BC - student_log_BC)).sum(-1)
    same_B = student_BC.argmax(-1) == teacher_BC.argmax(-1)
    return {
        "kl": (weight_B * kl_B).double().sum(),
        "agreement": (weight_B * same_B).double().sum(),
    }


def calibration_error(logits_NC: Tensor, label_N: Tensor) -> float:
    """Return the calibration error of N predictions, 15 bins (arXiv:1706.04599)."""
    bins = score(logits_NC, label_N, torch.ones(len(label_N)))["bins"]
    return (_gap(bins) / len(label_N)).item()


def temperature(logits_NC: Tensor, label_N: Tensor) -> float:
    """Return the T at which softmax(logits / T) has the lowest negative log-likelihood.

    Temperature scaling of Guo et al. 2017 (arXiv:1706.04599), section 4.2. T is from
    LOWEST to HIGHEST; each label [N] is from 0 to C - 1.
    """
    logits_NC = logits_NC.double()
    logits_NC = logits_NC - logits_NC.gather(1, label_N[:, None])
    # Bisection on 1 / T, in which the negative log-likelihood is convex.
    low = 1 / HIGHEST
    high = 1 / LOWEST
    for _ in range(60):
        factor = (low * high) ** 0.5
        slope = ((factor * logits_NC).softmax(1) * logits_NC).sum(1).mean()
        if slope < 0:
            low = factor
        else:
            high = factor
    return (low * high) ** -0.5


def _gap(bins: Tensor) -> Tensor:
    """Return the sum over bins [2, K] of |confidence - correct predictions|."""
    return (bins[0] - bins[1]).abs().sum()
