"""Models that answer with sets of labels on the validation split: average precision, F1, agreement.

Shape legend: B images of a batch, N images of the split, C classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kd.engine.evaluate import Evaluator
from kd.types import Batch

FEWEST = 10
"""Images of a class from which its own threshold is chosen; with fewer it would fit chance."""


class LabelSetEvaluator(Evaluator):
    """Score models that answer for each class alone. Called as `kd.engine.evaluate.Evaluator` is.

    It returns for the student `map` (the mean over classes of the average precision), `f1_macro` and `f1_micro` at the
    threshold 0.5, and `nll` (nats an image, summed over classes), over the images with labels; with a teacher also the
    same with `teacher_` before, `kl` (teacher || student, nats, summed over classes) and `agreement` (see `jaccard`).
    Precision needs all scores at once: the logits of the whole split are held in memory, 4 bytes a number.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.decides = "map" if self.labelled else "agreement"

    def _row(self, batch: Batch, student_BC: Tensor, teacher_BC: Tensor | None) -> dict[str, Tensor]:
        """Return the answers of a batch, with the images that they are for."""
        row = {"ids": batch.ids, "seen": batch.weight > 0, "student": student_BC}
        row |= {"label": batch.label} if self.labelled else {}
        return row | ({"teacher": teacher_BC} if teacher_BC is not None else {})

    def _finish(self, rows: list[dict[str, Tensor]]) -> dict[str, float]:
        ids_N, seen_N = (torch.cat([row[name] for row in rows]) for name in ("ids", "seen"))
        found = {name: self._whole(torch.cat([row[name] for row in rows]), ids_N, seen_N) for name in rows[0]}
        seen = found["seen"][:, 0] > 0
        label = found["label"][seen] if self.labelled else torch.zeros(int(seen.sum()), 0)
        known = (label >= 0).all(1)
        self._require(len(label), int(known.sum()))
        student, values = found["student"][seen].double(), {}
        if self.labelled:
            values = score(student[known], label[known] > 0)
            self.chance = (label[known] > 0).double().mean().item()
        if self.has_teacher:
            teacher = found["teacher"][seen].double()
            of_teacher = score(teacher[known], label[known] > 0) if self.labelled else {}
            values |= {f"teacher_{name}": value for name, value in of_teacher.items()}
            values |= {"kl": divergence(teacher, student), "agreement": jaccard(teacher > 0, student > 0)}
        shared = torch.tensor(list(values.values()), device=self.backend.device)
        self.backend.broadcast_([shared])  # another processor may round otherwise
        return dict(zip(values, shared.tolist(), strict=True))

    def _whole(self, mine: Tensor, ids: Tensor, seen: Tensor) -> Tensor:
        """Return the rows of all ranks, [N, ...], by image, on the CPU; 0 for an image that nobody saw."""
        rows = torch.where(seen[:, None], mine.view(len(mine), -1).float(), 0.0)
        whole = torch.zeros(len(self.plan.ids), rows.shape[1], device=rows.device).index_add_(0, ids, rows)
        return self.backend.reduce_sum(whole).cpu()


def score(logits_NC: Tensor, truth_NC: Tensor) -> dict[str, float]:
    """Return the scores of logits, where truth says which classes an image shows."""
    right = truth_NC.any(0)  # a class that no image shows has no precision
    per_class = average_precision(logits_NC, truth_NC)[right]
    said_NC = logits_NC > 0
    f1_C = f1(*counts(said_NC, truth_NC))[right]
    micro = f1(*(count_C.sum() for count_C in counts(said_NC, truth_NC)))
    nll_NC = F.binary_cross_entropy_with_logits(logits_NC, truth_NC.to(logits_NC.dtype), reduction="none")
    return {
        "map": per_class.mean().item() if len(per_class) else 0.0,
        "f1_macro": f1_C.mean().item() if len(f1_C) else 0.0,
        "f1_micro": micro.item(),
        "nll": nll_NC.sum(1).mean().item(),
    }


def average_precision(score_NC: Tensor, truth_NC: Tensor) -> Tensor:
    """Return the average precision of each class, float64 [C]; 0 of a class that no image shows.

    The sum over thresholds of precision times the gain in recall, without interpolation. Images with the same score
    pass a threshold together.
    """
    sorted_NC, order_NC = score_NC.sort(0, descending=True)
    hits_NC = truth_NC.gather(0, order_NC).double().cumsum(0)
    rank_N1 = torch.arange(1, len(score_NC) + 1, dtype=torch.float64)[:, None]
    last_NC = torch.ones_like(truth_NC, dtype=torch.bool)
    last_NC[:-1] = sorted_NC[:-1] != sorted_NC[1:]
    found = []
    for hits_N, last_N in zip(hits_NC.T, last_NC.T, strict=True):
        reached = hits_N[last_N]
        gain = torch.diff(reached, prepend=reached.new_zeros(1)) / hits_N[-1].clamp_min(1)
        found.append((gain * reached / rank_N1[last_N, 0]).sum())
    return torch.stack(found)


def counts(said_NC: Tensor, truth_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each class how many answers are right, too many, and missing, float64 [C]."""
    right = (said_NC & truth_NC).double().sum(0)
    return right, said_NC.double().sum(0) - right, truth_NC.double().sum(0) - right


def f1(right: Tensor, extra: Tensor, missing: Tensor) -> Tensor:
    """Return the harmonic mean of precision and recall; 0 where there is nothing to find."""
    return 2 * right / (2 * right + extra + missing).clamp_min(1)


def divergence(teacher_NC: Tensor, student_NC: Tensor) -> float:
    """Return the mean KL divergence (teacher || student) of the answers yes and no, nats, summed over classes."""
    yes = teacher_NC.sigmoid() * (F.logsigmoid(teacher_NC) - F.logsigmoid(student_NC))
    no = (-teacher_NC).sigmoid() * (F.logsigmoid(-teacher_NC) - F.logsigmoid(-student_NC))
    return (yes + no).sum(1).mean().item()


def jaccard(one_NC: Tensor, other_NC: Tensor) -> float:
    """Return the mean share of labels that two sets have in common; 1 where both are empty.

    Single decisions would hardly differ: most classes are absent from most images.
    """
    both, either = (one_NC & other_NC).double().sum(1), (one_NC | other_NC).double().sum(1)
    return torch.where(either > 0, both / either.clamp_min(1), 1.0).mean().item()


def thresholds(logits_NC: Tensor, truth_NC: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each class the probability from which it is answered, and whether it was chosen, [C] and bool [C].

    The threshold with the largest F1 on these images (arXiv:1402.1892), halfway between two scores; 0.5 for a class
    that fewer than `FEWEST` images show, or that all but so few do.
    """
    chosen = []
    for logits_N, truth_N in zip(logits_NC.double().T, truth_NC.T, strict=True):
        few = min(int(truth_N.sum()), int((~truth_N).sum())) < FEWEST
        sorted_N, order_N = logits_N.sigmoid().sort(descending=True)
        hits_N = truth_N[order_N].double().cumsum(0)
        value_N = 2 * hits_N / (torch.arange(1, len(hits_N) + 1) + hits_N[-1])
        below_N = torch.cat([sorted_N[1:], sorted_N.new_zeros(1)])
        value_N[sorted_N == below_N] = -1  # a threshold cannot part images with the same score
        best = int(value_N.argmax())
        chosen.append(0.5 if few else float((sorted_N[best] + below_N[best]) / 2))
    shown_C = truth_NC.sum(0)
    enough_C = torch.minimum(shown_C, len(truth_NC) - shown_C) >= FEWEST
    return torch.tensor(chosen, dtype=torch.float64), enough_C
