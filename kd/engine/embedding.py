"""An embedding student on the validation split: agreement with its teacher, nearest neighbours, a linear probe.

Shape legend: N images that are searched, M images that ask, B images of a batch, C classes, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kd.contracts import Backend, Loader, Teacher
from kd.engine.criterion import Criterion
from kd.errors import DataError
from kd.types import Batch, Outputs, Plan

NEIGHBOURS, TEMPERATURE = 20, 0.07
"""Of the search, as in DINO (arXiv:2104.14294)."""
STRENGTHS = tuple(10.0**power for power in range(-5, 3))
"""Of the probe's penalty, as a share of the mean eigenvalue; the best by leave-one-out is taken."""
KEPT_BYTES = 1 << 30
"""Of the teacher's outputs for validation images that are kept for the next evaluations."""
STUDENT = "student"


@dataclass(frozen=True, slots=True)
class Split:
    """Images of one split, as evaluation shows them."""

    loader: Loader
    plan: Plan
    """Of ascending ids, padded with weight 0."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of a split, of all ranks, on the CPU; images without a vector or a label are left out."""

    vectors: Mapping[str, Tensor]
    """float32 [N, D] of length 1, by model: `STUDENT`, and the numbers of the teachers."""
    labels: Tensor
    """int64 [N]."""


class EmbeddingEvaluator:
    """Score an embedding student. Called as `kd.engine.evaluate.Evaluator` is.

    Neighbours and the probe learn from training images, without augmentation, and are scored on the validation split.
    They need labels, which the student never sees. Of averaged weights, the projectors are those of the moment.
    """

    def __init__(
        self,
        backend: Backend,
        val: Split,
        bank: Split | None,
        teacher: Teacher,
        criterion: Criterion,
        num_classes: int,
        members: int,
    ) -> None:
        """Prepare; nothing is computed yet.

        Args:
            backend: set up.
            val: the validation split.
            bank: training images to search in; None: there are no labels, agreement alone is measured.
            teacher: live.
            criterion: holds the projectors, through which student and teacher are compared.
            num_classes: C.
            members: number of teachers.
        """
        self.backend, self.loader, self.plan, self.val, self.bank = backend, val.loader, val.plan, val, bank
        self.teacher, self.criterion, self.num_classes, self.members = teacher, criterion, num_classes, members
        self.decides = "agreement" if bank is None else "knn"
        """Which value says what the best checkpoint is."""
        self.labelled = bank is not None
        """Whether neighbours and the probe are scored."""
        self._outputs: list[Outputs] = []
        self._bytes = 0
        self._of_teacher: dict[str, Tensor] = {}
        """The teacher's vectors of the bank."""

    @torch.no_grad()
    def __call__(
        self, student: nn.Module, limit: int = 0, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Evaluate over all ranks.

        Args:
            student: maps uint8 images [B, 3, H, W] to Outputs with "pooled".
            limit: not used: neighbours need the whole split.
            stop: asked before each batch, on all ranks alike; True gives the evaluation up.

        Returns:
            `agreement`: of the projected student with the teacher, the mean cosine of validation images. With labels
            also the accuracies `knn` (20 neighbours, weighted by exp(cosine / 0.07)) and `probe` (a ridge classifier)
            of the student's vectors, and the same of each teacher: `teacher_knn`, `teacher_knn_2`, ... Empty if the
            evaluation was given up.

        Raises:
            DataError: no validation image could be decoded.
        """
        training = student.training
        student.eval()
        try:
            asking = self._embed(student, self.val, stop, agreeing=True)
            searched = self._embed(student, self.bank, stop) if asking is not None and self.bank is not None else None
        finally:
            student.train(training)
        if asking is None or (self.bank is not None and searched is None):
            return {}
        embedded, agreement = asking
        values = {"agreement": agreement}
        if searched is not None:
            values |= self._scores(searched[0], embedded)
        shared = torch.tensor(list(values.values()), device=self.backend.device)
        self.backend.broadcast_([shared])  # a library may round otherwise on another machine
        return dict(zip(values, shared.tolist(), strict=True))

    def _scores(self, bank: Embedded, asking: Embedded) -> dict[str, float]:
        values = {}
        for name, bank_ND in bank.vectors.items():
            prefix, suffix = ("", "") if name == STUDENT else ("teacher_", "" if name == "0" else f"_{int(name) + 1}")
            given = (bank_ND, bank.labels, asking.vectors[name], self.num_classes)
            for kind, classify in (("knn", nearest), ("probe", ridge)):
                right_M = classify(*given).argmax(-1) == asking.labels
                values[f"{prefix}{kind}{suffix}"] = right_M.double().mean().item()
        return values

    def _embed(
        self, student: nn.Module, split: Split, stop: Callable[[], bool], agreeing: bool = False
    ) -> tuple[Embedded, float] | None:
        """Return the vectors of a split and, if `agreeing`, the mean agreement; None where `stop` said so."""
        backend, known = self.backend, {} if agreeing else self._of_teacher
        ids_N = split.plan.ids[split.plan.weights > 0].to(backend.device)
        rows: dict[str, Tensor] = {}
        sums = torch.zeros(2, dtype=torch.float64, device=backend.device)
        for number, batch in enumerate(backend.put(split.loader.epoch(split.plan, view=0))):
            if stop():
                return None
            with backend.autocast():
                outputs = student(batch.image)
            vectors = {STUDENT: outputs.features["pooled"]}
            if agreeing or not known:
                of_teacher = self._teacher_outputs(number, batch, keep=agreeing)
                vectors |= {str(k): of_teacher.of(k).features["pooled"] for k in range(self.members)}
                if agreeing:
                    agreement_B = self.criterion.agreement(outputs, of_teacher).double()
                    sums += torch.stack([(batch.weight * agreement_B).sum(), batch.weight.double().sum()])
            found = {name: F.normalize(value.float(), dim=1) for name, value in vectors.items()}
            found |= {"label": batch.label.float()[:, None], "seen": torch.ones_like(batch.weight)[:, None]}
            place_B = torch.searchsorted(ids_N, batch.ids)
            for name, value_BD in found.items():
                if name not in rows:
                    rows[name] = torch.zeros(len(ids_N), value_BD.shape[1], device=backend.device)
                rows[name].index_add_(0, place_B, batch.weight[:, None] * value_BD)
            backend.end_step()
        return self._gather(rows, known, agreeing), self._mean(sums) if agreeing else 0.0

    def _teacher_outputs(self, number: int, batch: Batch, keep: bool) -> Outputs:
        """Return the teacher's outputs for a batch; those of the validation split from memory, as far as it goes."""
        if keep and number < len(self._outputs):
            return self._outputs[number]
        outputs = self.teacher(batch)
        size = sum(tensor.nbytes for tensor in outputs.features.values())
        if keep and number == len(self._outputs) and self._bytes + size <= KEPT_BYTES:
            self._outputs.append(outputs)
            self._bytes += size
        self.backend.end_step()
        return outputs

    def _gather(self, rows: dict[str, Tensor], known: dict[str, Tensor], agreeing: bool) -> Embedded:
        whole = {name: self.backend.reduce_sum(value).cpu() for name, value in rows.items()}
        label_N, seen_N = whole.pop("label")[:, 0], whole.pop("seen")[:, 0]
        if not agreeing:
            self._of_teacher = known or {name: value for name, value in whole.items() if name != STUDENT}
            whole = {STUDENT: whole[STUDENT], **self._of_teacher}
        use_N = (seen_N > 0) & (label_N >= 0)
        return Embedded({name: value[use_N] for name, value in whole.items()}, label_N[use_N].long())

    def _mean(self, sums: Tensor) -> float:
        total, images = self.backend.reduce_sum(sums).tolist()
        if images == 0:
            wrong = "no image of the validation split could be decoded: there is nothing to evaluate"
            raise DataError("data", wrong, "At least one image", "Check the validation images; see data.on_corrupt")
        return total / images


def nearest(bank_ND: Tensor, label_N: Tensor, asking_MD: Tensor, num_classes: int) -> Tensor:
    """Return the votes [M, C] of the nearest neighbours of unit vectors.

    DINO (arXiv:2104.14294) after arXiv:1805.01978: the `NEIGHBOURS` nearest by cosine vote for their class, each with
    exp(cosine / `TEMPERATURE`).
    """
    votes = []
    for part_BD in asking_MD.split(1024):
        cosine_BK, near_BK = (part_BD @ bank_ND.T).topk(min(NEIGHBOURS, len(bank_ND)))
        counts_BC = torch.zeros(len(part_BD), num_classes)
        votes.append(counts_BC.scatter_add_(1, label_N[near_BK], (cosine_BK / TEMPERATURE).exp()))
    return torch.cat(votes) if votes else torch.zeros(0, num_classes)


def ridge(bank_ND: Tensor, label_N: Tensor, asking_MD: Tensor, num_classes: int) -> Tensor:
    """Return the scores [M, C] of a linear probe: ridge regression of the classes' indicators, in float64.

    The penalty is the one of `STRENGTHS` with the least squared error where each image is predicted from all others,
    which a closed form gives: the residual divided by 1 - its leverage.
    """
    mean_D = bank_ND.double().mean(0)
    target_NC = F.one_hot(label_N, num_classes).double()
    shares_C = target_NC.mean(0)
    x_ND, y_NC = bank_ND.double() - mean_D, target_NC - shares_C
    values_D, basis_DD = torch.linalg.eigh(x_ND.T @ x_ND)
    values_D = values_D.clamp_min(0)
    turned_ND = x_ND @ basis_DD
    projected_DC = turned_ND.T @ y_NC
    best, weights_DC = float("inf"), torch.zeros_like(projected_DC)
    for strength in STRENGTHS:
        inverse_D = 1 / (values_D + strength * values_D.mean().clamp_min(1e-12))
        candidate_DC = inverse_D[:, None] * projected_DC
        leverage_N = (turned_ND.square() * inverse_D).sum(1) + 1 / len(x_ND)
        error = ((y_NC - turned_ND @ candidate_DC) / (1 - leverage_N).clamp_min(1e-9)[:, None]).square().mean().item()
        if error < best:
            best, weights_DC = error, candidate_DC
    return (asking_MD.double() - mean_D) @ basis_DD @ weights_DC + shares_C
