"""Predict several labels per image, or none, by an independent sigmoid per class.

Shape legend: B images of a batch, N images of the split, C classes, K teachers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kd.core.evaluation import Evaluation
from kd.core.facts import NoOptions as Options
from kd.core.intervals import Samples, bootstrap_scores
from kd.core.ranks import numbers_of_rank_0
from kd.core.scores import Column, GraphScores, Scores
from kd.core.text import AS_TRAINED
from kd.core.types import Batch
from kd.parts.tasks._logits import LogitsEvaluator, gather_images, require_images

# fewest images of a class for its own threshold; with fewer it would fit noise
FEWEST = 10
DIVERGENCE = "divergence of the student's probabilities from the teacher's"
SCORES = Scores(
    own=(
        Column("map", "mAP"),
        Column("f1_macro", "F1 (macro)"),
        Column("f1_micro", "F1 (micro)"),
    ),
    pair=(
        Column(
            "agreement",
            "agreement",
            meaning="labels in common, of those that either gives",
        ),
        Column("kl", "KL", "nats", f"{DIVERGENCE}, summed over classes", smaller=True),
    ),
)


class LabelSets:
    """See `kd.core.evaluation.Task`."""

    name = "label_sets"
    logits = "sigmoid"
    label = "set"
    problem_type = "multi_label_classification"
    label_loss = "bce"
    scores = SCORES
    keeps_topk = False

    def evaluator(self, setting: Evaluation) -> LabelSetsEvaluator:
        return LabelSetsEvaluator(setting, self.scores)

    def average(self, logits_KBC: Tensor, shares_K: Tensor) -> Tensor:
        """Return log(p / (1 - p)) of the averaged p of K teachers."""
        log_share_K11 = shares_K.log()[:, None, None]
        yes_BC = (F.logsigmoid(logits_KBC) + log_share_K11).logsumexp(0)
        no_BC = (F.logsigmoid(-logits_KBC) + log_share_K11).logsumexp(0)
        return yes_BC - no_BC

    def no_labels(self, images: int, num_classes: int) -> Tensor:
        return torch.zeros(images, num_classes, dtype=torch.int8)

    def refuse(self, answer_BC: Tensor) -> str:
        distance_B = (answer_BC.double().sum(1) - 1).abs()
        if not (distance_B < 1e-3).all() or not self.are_probabilities(answer_BC):
            return ""
        return (
            "returns probabilities that sum to 1 (one label per image), but the losses"
            " are for several labels"
        )

    def are_probabilities(self, answer_BC: Tensor) -> bool:
        return bool((answer_BC >= 0).all() and (answer_BC <= 1).all())

    def from_probabilities(self, answer_BC: Tensor) -> Tensor:
        return answer_BC.logit(1e-6)

    def graph_scores(
        self, outputs: Tensor, reference: Tensor, label: Tensor
    ) -> GraphScores:
        """Count equal largest logits, and return mAP of the labelled images.

        Without labelled images the equal logits decide.
        """
        images = len(outputs)
        same = int((outputs.argmax(1) == reference.argmax(1)).sum())
        different = images - same
        facts: dict[str, float] = {"same_top1": same}
        summary = f"same top-1 on {same} of {images} validation images"
        labelled = are_labelled(label)
        if not labelled.any():
            value = same / max(1, images)
            return GraphScores(facts, value, AS_TRAINED, summary, different, images)
        facts["mAP"] = score(outputs[labelled], label[labelled] > 0)["map"]
        return GraphScores(facts, facts["mAP"], "mAP", summary, different)

    def thresholds(
        self, logits_NC: Tensor, label: Tensor, classes: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        labelled = are_labelled(label)
        if not labelled.any():
            entry = {"threshold": 0.5, "chosen": False, "images": 0}
            return {name: dict(entry) for name in classes}
        logits_NC = logits_NC[labelled]
        truth_NC = label[labelled] > 0
        threshold_C, chosen_C = thresholds(logits_NC, truth_NC)
        entries: dict[str, dict[str, Any]] = {}
        for name, threshold, chosen, images in zip(
            classes,
            threshold_C.tolist(),
            chosen_C.tolist(),
            truth_NC.sum(0).tolist(),
            strict=True,
        ):
            entries[name] = {
                "threshold": round(threshold, 6),
                "chosen": chosen,
                "images": images,
            }
        if len(truth_NC) >= 2 * FEWEST:
            f1_C = exchanged_f1(logits_NC, truth_NC)
            for name, value in zip(classes, f1_C.tolist(), strict=True):
                entries[name]["f1"] = round(value, 6)
        return entries


def build(options: Options) -> LabelSets:
    """Build the task."""
    return LabelSets()


class LabelSetsEvaluator(LogitsEvaluator):
    """Scores models that predict each class independently.

    A row has the student's values of `score` over labelled images; with a teacher also
    the teacher's under `teacher_KEY`, `kl` (teacher || student, nats, summed over
    classes) and `agreement` (see `jaccard`). Average precision needs all scores at
    once: the logits of the whole split are kept in memory, 4 bytes each.
    """

    _labelled: tuple[Tensor, ...] = ()
    """Truth [N, C] and logits of student and teacher, of labelled images, from the last
    evaluation.
    """

    def _row(
        self, batch: Batch, student_BC: Tensor, teacher_BC: Tensor | None
    ) -> dict[str, Tensor]:
        row = {"ids": batch.ids, "seen": batch.weight > 0, "student": student_BC}
        if self.labelled:
            row["label"] = batch.label
        if teacher_BC is not None:
            row["teacher"] = teacher_BC
        return row

    def _finish(self, rows: list[dict[str, Tensor]]) -> dict[str, float]:
        gathered = gather_images(rows, self.val, self.backend)
        decoded = gathered["seen"][:, 0] > 0
        models = {"": gathered["student"][decoded].double()}
        if self.teacher is not None:
            models["teacher_"] = gathered["teacher"][decoded].double()
        values: dict[str, float] = {}
        self._labelled = ()
        if self.labelled:
            label_NC = gathered["label"][decoded]
            labelled = (label_NC >= 0).all(1)
            require_images(self.val, len(label_NC), int(labelled.sum()))
            truth_NC = label_NC[labelled] > 0
            self.chance = truth_NC.double().mean().item()
            logits = [logits_NC[labelled] for logits_NC in models.values()]
            self._labelled = (truth_NC, *logits)
            for prefix, logits_NC in zip(models, logits, strict=True):
                for name, value in score(logits_NC, truth_NC).items():
                    values[prefix + name] = value
        else:
            require_images(self.val, int(decoded.sum()))
        if self.teacher is not None:
            student_NC, teacher_NC = models.values()
            values["kl"] = divergence(teacher_NC, student_NC)
            values["agreement"] = jaccard(teacher_NC > 0, student_NC > 0)
        # Another processor may round otherwise.
        shared = numbers_of_rank_0(self.backend, [*values.values()])
        return dict(zip(values, shared, strict=True))

    def samples(self) -> dict[str, Samples]:
        """Return bootstrap values, of the same resamples for student and teacher."""
        if not self._labelled:
            return {}
        truth_NC, *models = self._labelled
        samples = {}
        for prefix, logits_NC in zip(("", "teacher_"), models, strict=False):
            for key, value in _bootstrap(logits_NC, truth_NC).items():
                samples[prefix + key] = value
        return samples


def _bootstrap(logits_NC: Tensor, truth_NC: Tensor) -> dict[str, Samples]:
    images = len(truth_NC)
    values = score(logits_NC, truth_NC)
    rows = bootstrap_scores(
        lambda ids: [*score(logits_NC[ids], truth_NC[ids]).values()], images
    )
    replicates = dict(zip(values, rows.T, strict=True))
    return {
        column.key: Samples(
            values[column.key], replicates=replicates[column.key], images=images
        )
        for column in SCORES.own
    }


def are_labelled(label: Tensor) -> Tensor:
    """Return which images have labels, bool [N], given label sets [N, C].

    Of unlabelled data `label` is -1, [N].
    """
    return label >= 0 if label.ndim == 1 else (label >= 0).all(1)


def score(logits_NC: Tensor, truth_NC: Tensor) -> dict[str, float]:
    """Return mAP, F1 at the threshold 0.5, and nats per image.

    `truth_NC`: whether an image shows a class, bool.
    """
    has_images_C = truth_NC.any(0)  # a class without images has no precision
    precision_C = average_precision(logits_NC, truth_NC)[has_images_C]
    counts_C = counts(logits_NC > 0, truth_NC)
    f1_C = f1(*counts_C)[has_images_C]
    micro = f1(*(count_C.sum() for count_C in counts_C))
    nll_NC = F.binary_cross_entropy_with_logits(
        logits_NC, truth_NC.to(logits_NC.dtype), reduction="none"
    )
    return {
        "map": precision_C.mean().item() if len(precision_C) else 0.0,
        "f1_macro": f1_C.mean().item() if len(f1_C) else 0.0,
        "f1_micro": micro.item(),
        "nll": nll_NC.sum(1).mean().item(),
    }


def average_precision(score_NC: Tensor, truth_NC: Tensor) -> Tensor:
    """Return each class's average precision, float64 [C], 0 for one without images."""
    # The sum over thresholds of precision times the gain in recall, without
    # interpolation. Images with equal scores pass a threshold together.
    sorted_NC, order_NC = score_NC.sort(0, descending=True)
    hits_NC = truth_NC.gather(0, order_NC).double().cumsum(0)
    rank_N1 = torch.arange(1, len(score_NC) + 1, dtype=torch.float64)[:, None]
    last_NC = torch.ones_like(truth_NC, dtype=torch.bool)
    last_NC[:-1] = sorted_NC[:-1] != sorted_NC[1:]
    precisions = []
    for hits_N, last_N in zip(hits_NC.T, last_NC.T, strict=True):
        hits_T = hits_N[last_N]  # T thresholds
        gain_T = torch.diff(hits_T, prepend=hits_T.new_zeros(1))
        gain_T /= hits_N[-1].clamp_min(1)
        precisions.append((gain_T * hits_T / rank_N1[last_N, 0]).sum())
    return torch.stack(precisions)


def counts(answer_NC: Tensor, truth_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each class's true and false positives and false negatives, float64 [C]."""
    right = (answer_NC & truth_NC).double().sum(0)
    return right, answer_NC.double().sum(0) - right, truth_NC.double().sum(0) - right


def f1(right: Tensor, extra: Tensor, missing: Tensor) -> Tensor:
    """Return F1, the harmonic mean of precision and recall; 0 without positives."""
    return 2 * right / (2 * right + extra + missing).clamp_min(1)


def divergence(teacher_NC: Tensor, student_NC: Tensor) -> float:
    """Return the mean of KL(teacher || student) summed over yes/no classes, nats."""
    yes = teacher_NC.sigmoid() * (F.logsigmoid(teacher_NC) - F.logsigmoid(student_NC))
    no = (-teacher_NC).sigmoid() * (
        F.logsigmoid(-teacher_NC) - F.logsigmoid(-student_NC)
    )
    return (yes + no).sum(1).mean().item()


def jaccard(one_NC: Tensor, other_NC: Tensor) -> float:
    """Return the mean Jaccard index of two label sets; 1 if both are empty."""
    # Single decisions would hardly differ: most classes are absent from most images.
    both_N = (one_NC & other_NC).double().sum(1)
    either_N = (one_NC | other_NC).double().sum(1)
    return torch.where(either_N > 0, both_N / either_N.clamp_min(1), 1.0).mean().item()


def exchanged_f1(logits_NC: Tensor, truth_NC: Tensor) -> Tensor:
    """Return each class's F1 [C], with thresholds chosen on the other half of images.

    So no image is scored by thresholds that it chose. A half is every second image.
    """
    first_N = torch.arange(len(truth_NC)) % 2 == 0
    answer_NC = torch.zeros_like(truth_NC)
    for half_N in (first_N, ~first_N):
        threshold_C, _ = thresholds(logits_NC[half_N], truth_NC[half_N])
        answer_NC[~half_N] = logits_NC[~half_N].double().sigmoid() > threshold_C
    return f1(*counts(answer_NC, truth_NC))


def thresholds(logits_NC: Tensor, truth_NC: Tensor) -> tuple[Tensor, Tensor]:
    """Return each class's threshold, a probability, and whether it was chosen, [C].

    The threshold has the largest F1 on these images (arXiv:1402.1892), halfway between
    two scores; 0.5 for a class with fewer than `FEWEST` positive or negative images.
    """
    positives_C = truth_NC.sum(0)
    enough_C = torch.minimum(positives_C, len(truth_NC) - positives_C) >= FEWEST
    values = []
    for logits_N, truth_N in zip(logits_NC.double().T, truth_NC.T, strict=True):
        sorted_N, order_N = logits_N.sigmoid().sort(descending=True)
        hits_N = truth_N[order_N].double().cumsum(0)
        value_N = 2 * hits_N / (torch.arange(1, len(hits_N) + 1) + hits_N[-1])
        below_N = torch.cat([sorted_N[1:], sorted_N.new_zeros(1)])
        value_N[sorted_N == below_N] = -1  # a threshold cannot separate equal scores
        best = int(value_N.argmax())
        values.append(float((sorted_N[best] + below_N[best]) / 2))
    threshold_C = torch.tensor(values, dtype=torch.float64)
    return torch.where(enough_C, threshold_C, 0.5), enough_C
