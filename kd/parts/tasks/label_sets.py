"""Several labels per image, or none: each class is predicted independently, by a
sigmoid.

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
from kd.parts.tasks._logits import LogitsEvaluator, gathered, require_images

FEWEST = (
    10  # fewest images of a class for its own threshold; with fewer it would fit noise
)
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

    name, logits, label, problem_type = (
        "label_sets",
        "sigmoid",
        "set",
        "multi_label_classification",
    )
    label_loss, scores, keeps_topk = "bce", SCORES, False

    def evaluator(self, setting: Evaluation) -> LabelSetsEvaluator:
        return LabelSetsEvaluator(setting, self.scores)

    def average(self, logits_KBC: Tensor, shares_K: Tensor) -> Tensor:
        """Return log(p / (1 - p)) of the averaged p of K teachers."""
        shares_K11 = shares_K.log()[:, None, None]
        yes_BC, no_BC = (
            (F.logsigmoid(sign * logits_KBC) + shares_K11).logsumexp(0)
            for sign in (1, -1)
        )
        return yes_BC - no_BC

    def no_labels(self, images: int, num_classes: int) -> Tensor:
        return torch.zeros(images, num_classes, dtype=torch.int8)

    def refuse(self, answer_BC: Tensor) -> str:
        one = bool(((answer_BC.double().sum(1) - 1).abs() < 1e-3).all())
        if not (one and self.are_probabilities(answer_BC)):
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
        """Count equal largest logits; average precision is of the labelled images. If
        none is, equal ones decide.
        """
        images, same, known = (
            len(outputs),
            int((outputs.argmax(1) == reference.argmax(1)).sum()),
            are_known(label),
        )
        summary = f"same top-1 on {same} of {images} validation images"
        if not known.any():
            return GraphScores(
                {"same_top1": same},
                same / max(1, images),
                AS_TRAINED,
                summary,
                images - same,
                images,
            )
        precision = score(outputs[known], label[known] > 0)["map"]
        return GraphScores(
            {"same_top1": same, "mAP": precision},
            precision,
            "mAP",
            summary,
            images - same,
        )

    def thresholds(
        self, logits_NC: Tensor, label: Tensor, classes: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        known = are_known(label)
        if not known.any():
            return {
                name: {"threshold": 0.5, "chosen": False, "images": 0}
                for name in classes
            }
        truth = label[known] > 0
        values_C, enough_C = thresholds(logits_NC[known], truth)
        columns = zip(
            classes,
            values_C.tolist(),
            enough_C.tolist(),
            truth.sum(0).tolist(),
            strict=True,
        )
        found: dict[str, dict[str, Any]] = {}
        for name, value, enough, images in columns:
            found[name] = {
                "threshold": round(value, 6),
                "chosen": enough,
                "images": images,
            }
        if len(truth) >= 2 * FEWEST:
            for name, value in zip(
                classes, exchanged_f1(logits_NC[known], truth).tolist(), strict=True
            ):
                found[name]["f1"] = round(value, 6)
        return found


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

    _known: tuple[Tensor, ...] = ()
    """Of the last evaluation: truth [N, C] and the logits of student and teacher, for
    labelled images.
    """

    def _row(
        self, batch: Batch, student_BC: Tensor, teacher_BC: Tensor | None
    ) -> dict[str, Tensor]:
        row = {"ids": batch.ids, "seen": batch.weight > 0, "student": student_BC}
        row |= {"label": batch.label} if self.labelled else {}
        return row | ({"teacher": teacher_BC} if teacher_BC is not None else {})

    def _finish(self, rows: list[dict[str, Tensor]]) -> dict[str, float]:
        found = gathered(rows, self.val, self.backend)
        seen = found["seen"][:, 0] > 0
        label = (
            found["label"][seen] if self.labelled else torch.zeros(int(seen.sum()), 0)
        )
        known = (label >= 0).all(1)
        require_images(
            self.val, len(label), int(known.sum()) if self.labelled else None
        )
        student, values = found["student"][seen].double(), {}
        self._known = (label[known] > 0, student[known]) if self.labelled else ()
        if self.labelled:
            values = score(student[known], label[known] > 0)
            self.chance = (label[known] > 0).double().mean().item()
        if self.teacher is not None:
            teacher = found["teacher"][seen].double()
            of_teacher = (
                score(teacher[known], label[known] > 0) if self.labelled else {}
            )
            self._known = (*self._known, teacher[known]) if self.labelled else ()
            values |= {f"teacher_{name}": value for name, value in of_teacher.items()}
            values |= {
                "kl": divergence(teacher, student),
                "agreement": jaccard(teacher > 0, student > 0),
            }
        shared = numbers_of_rank_0(
            self.backend, [*values.values()]
        )  # another processor may round otherwise
        return dict(zip(values, shared, strict=True))

    def samples(self) -> dict[str, Samples]:
        """Return the bootstrap values of the own scores; the same resamples for student
        and teacher.
        """
        if not self._known:
            return {}
        found, (truth, *logits) = {}, self._known
        for prefix, one in zip(("", "teacher_"), logits, strict=False):
            keys, values = [column.key for column in SCORES.own], score(one, truth)
            drawn = bootstrap_scores(
                lambda ids, one=one: [*score(one[ids], truth[ids]).values()], len(truth)
            )
            drawn = dict(zip(values, drawn.T, strict=True))
            found |= {
                prefix + key: Samples(
                    values[key], replicates=drawn[key], images=len(truth)
                )
                for key in keys
            }
        return found


def are_known(label: Tensor) -> Tensor:
    """Return which images are labelled, bool [N], given label sets [N, C], or -1 [N]
    for unlabelled data.
    """
    return label >= 0 if label.ndim == 1 else (label >= 0).all(1)


def score(logits_NC: Tensor, truth_NC: Tensor) -> dict[str, float]:
    """Return mAP, F1 at the threshold 0.5, and nats per image; truth: classes in an
    image.
    """
    right = truth_NC.any(0)  # a class without images has no precision
    per_class = average_precision(logits_NC, truth_NC)[right]
    answer_NC = logits_NC > 0
    f1_C = f1(*counts(answer_NC, truth_NC))[right]
    micro = f1(*(count_C.sum() for count_C in counts(answer_NC, truth_NC)))
    nll_NC = F.binary_cross_entropy_with_logits(
        logits_NC, truth_NC.to(logits_NC.dtype), reduction="none"
    )
    return {
        "map": per_class.mean().item() if len(per_class) else 0.0,
        "f1_macro": f1_C.mean().item() if len(f1_C) else 0.0,
        "f1_micro": micro.item(),
        "nll": nll_NC.sum(1).mean().item(),
    }


def average_precision(score_NC: Tensor, truth_NC: Tensor) -> Tensor:
    """Return the average precision of each class, float64 [C]; 0 for a class without
    images.
    """
    # The sum over thresholds of precision times the gain in recall, without
    # interpolation. Images with equal scores pass a threshold together.
    sorted_NC, order_NC = score_NC.sort(0, descending=True)
    hits_NC = truth_NC.gather(0, order_NC).double().cumsum(0)
    rank_N1 = torch.arange(1, len(score_NC) + 1, dtype=torch.float64)[:, None]
    last_NC = torch.ones_like(truth_NC, dtype=torch.bool)
    last_NC[:-1] = sorted_NC[:-1] != sorted_NC[1:]
    found = []
    for hits_N, last_N in zip(hits_NC.T, last_NC.T, strict=True):
        reached = hits_N[last_N]
        gain = torch.diff(reached, prepend=reached.new_zeros(1)) / hits_N[-1].clamp_min(
            1
        )
        found.append((gain * reached / rank_N1[last_N, 0]).sum())
    return torch.stack(found)


def counts(answer_NC: Tensor, truth_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return true positives, false positives and false negatives of each class, float64
    [C].
    """
    right = (answer_NC & truth_NC).double().sum(0)
    return right, answer_NC.double().sum(0) - right, truth_NC.double().sum(0) - right


def f1(right: Tensor, extra: Tensor, missing: Tensor) -> Tensor:
    """Return F1, the harmonic mean of precision and recall; 0 without positives."""
    return 2 * right / (2 * right + extra + missing).clamp_min(1)


def divergence(teacher_NC: Tensor, student_NC: Tensor) -> float:
    """Return the mean KL divergence (teacher || student) of the yes/no probabilities,
    nats, summed over classes.
    """
    yes = teacher_NC.sigmoid() * (F.logsigmoid(teacher_NC) - F.logsigmoid(student_NC))
    no = (-teacher_NC).sigmoid() * (
        F.logsigmoid(-teacher_NC) - F.logsigmoid(-student_NC)
    )
    return (yes + no).sum(1).mean().item()


def jaccard(one_NC: Tensor, other_NC: Tensor) -> float:
    """Return the mean Jaccard index of two label sets; 1 if both are empty."""
    # Single decisions would hardly differ: most classes are absent from most images.
    both, either = (
        (one_NC & other_NC).double().sum(1),
        (one_NC | other_NC).double().sum(1),
    )
    return torch.where(either > 0, both / either.clamp_min(1), 1.0).mean().item()


def exchanged_f1(logits_NC: Tensor, truth_NC: Tensor) -> Tensor:
    """Return the F1 of each class [C], with each half's thresholds chosen on the other
    half.
    """
    # So no image is scored by thresholds that it chose. The halves are every second
    # image.
    first_N = torch.arange(len(truth_NC)) % 2 == 0
    answer_NC = torch.zeros_like(truth_NC)
    for half_N in (first_N, ~first_N):
        threshold_C, _ = thresholds(logits_NC[half_N], truth_NC[half_N])
        answer_NC[~half_N] = logits_NC[~half_N].double().sigmoid() > threshold_C
    return f1(*counts(answer_NC, truth_NC))


def thresholds(logits_NC: Tensor, truth_NC: Tensor) -> tuple[Tensor, Tensor]:
    """Return each class's threshold (a probability) [C], and whether it was chosen,
    bool [C].
    """
    # The threshold with the largest F1 on these images (arXiv:1402.1892), halfway
    # between two scores; 0.5 for a class with fewer than `FEWEST` positive or negative
    # images.
    chosen = []
    for logits_N, truth_N in zip(logits_NC.double().T, truth_NC.T, strict=True):
        few = min(int(truth_N.sum()), int((~truth_N).sum())) < FEWEST
        sorted_N, order_N = logits_N.sigmoid().sort(descending=True)
        hits_N = truth_N[order_N].double().cumsum(0)
        value_N = 2 * hits_N / (torch.arange(1, len(hits_N) + 1) + hits_N[-1])
        below_N = torch.cat([sorted_N[1:], sorted_N.new_zeros(1)])
        value_N[sorted_N == below_N] = -1  # a threshold cannot separate equal scores
        best = int(value_N.argmax())
        chosen.append(0.5 if few else float((sorted_N[best] + below_N[best]) / 2))
    shown_C = truth_NC.sum(0)
    enough_C = torch.minimum(shown_C, len(truth_NC) - shown_C) >= FEWEST
    return torch.tensor(chosen, dtype=torch.float64), enough_C
