"""Embeddings: compared with the teacher's, and scored by nearest neighbours and a
linear probe.

Shape legend: N images of the index, M query images, B images of a batch, C classes, D
features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.contracts import Teacher
from kd.core.errors import DataError
from kd.core.evaluation import Evaluation, Evaluator, Split, Task
from kd.core.facts import NoOptions as Options
from kd.core.intervals import Samples
from kd.core.ranks import numbers_of_rank_0
from kd.core.scores import Column, GraphScores, Scores
from kd.core.types import Batch, Outputs
from kd.parts.tasks._logits import Answers, gathered, require_images

NEIGHBOURS, TEMPERATURE = (
    20,
    0.07,
)  # neighbours and temperature of k-NN, as in DINO (arXiv:2104.14294)
RECALLED = 10  # results of a search in the teacher's index
PROJECTED, TEACHER = "projected", "teacher"
"""Names of vectors: the student's projected into the first teacher's space, and that
teacher's own.
"""
STRENGTHS = tuple(10.0**power for power in range(-5, 3))
"""The probe's penalties as shares of the mean eigenvalue; the best by leave-one-out is
used.
"""
LABELS = "labels"
NEAR, PROBE = Column("knn", "nearest neighbours"), Column("probe", "linear probe")
SCORES = Scores(
    own=(NEAR, PROBE, Column("recall", "recall@10 in the teacher's index")),
    pair=(
        Column(
            "agreement",
            "agreement",
            "",
            "mean cosine with the first teacher: of projected vectors, else of what the"
            " losses compare",
        ),
        Column(
            "found",
            "found",
            meaning="of the ten training images that the teacher's vector finds",
        ),
    ),
    note=(
        "Accuracies with the vectors alone: 20 neighbours among training images,"
        " weighted by exp(cosine / 0.07), and a ridge classifier. Recall@10: one of the"
        " ten training images that are nearest in the teacher's vectors shows the same"
        " class; the query is the student's projected vector. The labels were not used"
        " in training."
    ),
)


class Embedding(Task):
    """See `kd.core.evaluation.Task`."""

    name, logits, label, problem_type = "embedding", "", "class", ""
    label_loss, scores, keeps_topk = "ce", SCORES, True

    def evaluator(self, setting: Evaluation) -> EmbeddingEvaluator:
        return EmbeddingEvaluator(setting, self.scores)

    def average(self, logits_KBC: Tensor, shares_K: Tensor) -> Tensor:
        """Return logits of width 0: features are not averaged."""
        return logits_KBC[0]

    def are_probabilities(self, answer_BC: Tensor) -> bool:
        return False

    def from_probabilities(self, answer_BC: Tensor) -> Tensor:
        return answer_BC

    def graph_scores(
        self, outputs: Tensor, reference: Tensor, label: Tensor
    ) -> GraphScores:
        cosine = (outputs * reference).sum().item() / max(1, len(outputs))
        summary = f"mean cosine {cosine:.6f} on {len(outputs)} validation images"
        return GraphScores(
            {"cosine": cosine},
            cosine,
            "the mean cosine with PyTorch's vectors",
            summary,
        )


def build(options: Options) -> Embedding:
    """Build the task."""
    return Embedding()


def vectors_of(batch: Batch, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch's vectors [B, D] of length 1 by model, and the image fields for
    `gathered`.
    """
    unit = {
        name: F.normalize(value_BD.float(), dim=1) for name, value_BD in vectors.items()
    }
    return {**unit, LABELS: batch.label, "ids": batch.ids, "seen": batch.weight > 0}


class EmbeddingEvaluator(Evaluator):
    """Scores an embedding student. See `kd.core.evaluation.Evaluator`.

    Neighbours and the probe use training images without augmentation and are scored on
    the validation split, by labels that the student never sees. With averaged weights,
    projectors have their current weights. A row has `agreement`, with labels also `knn`
    and `probe`, and the same for each teacher: `teacher_knn`, `teacher_knn_2`, ...;
    with a projector also the scores of `recalled`.
    """

    chance = 0.0

    def __init__(self, setting: Evaluation, scores: Scores) -> None:
        assert setting.teacher is not None
        assert setting.agreement is not None
        self.projected = setting.projected or (lambda outputs: None)
        self.backend, self.val, self.loader = (
            setting.backend,
            setting.val,
            setting.val.loader,
        )
        self.answers, self.agreement = (
            Answers(setting.teacher, setting.backend),
            setting.agreement,
        )
        self.bank_teacher = setting.bank_teacher or setting.teacher
        self.num_classes, self.members = setting.num_classes, setting.members
        known = setting.labelled and setting.num_classes > 1
        self.bank = setting.bank() if known and setting.bank is not None else None
        self.labelled = (
            self.bank is not None
        )  # whether neighbours and the probe are scored
        self.selection_metric = scores.selection_metric(self.labelled).key
        self._searched: dict[str, Tensor] = {}  # the teachers' vectors of the bank
        self._right: dict[
            str, Tensor
        ] = {}  # of the last evaluation: correct images, bool [M] by key

    @torch.no_grad()
    def __call__(
        self, student: nn.Module, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        training = student.training
        student.eval()
        try:
            values = self._agree(student, stop)
        finally:
            student.train(training)
        if not values:
            return {}
        shared = numbers_of_rank_0(
            self.backend, [*values.values()]
        )  # another processor may round differently
        return dict(zip(values, shared, strict=True))

    def of(self, teacher: Teacher) -> EmbeddingEvaluator:
        other = copy.copy(self)
        other.answers, other.bank_teacher = Answers(teacher, self.backend), teacher
        other._searched, other._right = {}, {}
        return other

    def samples(self) -> dict[str, Samples]:
        return {
            key: Samples(one.double().mean().item(), right=one.cpu().numpy())
            for key, one in self._right.items()
        }

    def _agree(self, student: nn.Module, stop: Callable[[], bool]) -> dict[str, float]:
        backend, queries = self.backend, list[dict[str, Tensor]]()
        sums = torch.zeros(2, dtype=torch.float64, device=backend.device)
        for number, batch in enumerate(
            backend.put(self.val.loader.epoch(self.val.plan, view=0))
        ):
            if stop():
                return {}
            with backend.autocast():
                outputs = student(batch.image)
            teacher = self.answers(number, batch)
            agreement_B = self.agreement(outputs, teacher).double()
            sums += torch.stack(
                [(batch.weight * agreement_B).sum(), batch.weight.double().sum()]
            )
            moved = self.projected(outputs)
            moved = {} if moved is None or self.bank is None else {PROJECTED: moved}
            vectors = {"": outputs.features["pooled"], **moved, **self._pooled(teacher)}
            queries.append(vectors_of(batch, vectors))
            backend.end_step()
        total, images = backend.reduce_sum(sums).tolist()
        require_images(self.val, int(images))
        scores = (
            {}
            if self.bank is None
            else self._search(
                student, self.bank, self._gathered(queries, self.val), stop
            )
        )
        return (
            {"agreement": total / images, **scores}
            if self.bank is None or scores
            else {}
        )

    def _gathered(
        self, rows: list[dict[str, Tensor]], split: Split
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the vectors [N, D] by model, and the labels [N] (-1: unlabelled), on
        the CPU.
        """
        vectors = gathered(rows, split, self.backend)
        seen_N, label_N, _ = (
            vectors.pop(name)[:, 0] for name in ("seen", LABELS, "ids")
        )
        return vectors, torch.where(seen_N > 0, label_N, -1.0).long()

    def _search(
        self,
        student: nn.Module,
        split: Split,
        queries: tuple[dict[str, Tensor], Tensor],
        stop: Callable[[], bool],
    ) -> dict[str, float]:
        """Return the accuracies of k-NN and probe from training to validation images;
        {} if `stop` ended it.
        """
        backend, rows = self.backend, list[dict[str, Tensor]]()
        for batch in backend.put(split.loader.epoch(split.plan, view=0)):
            if stop():
                return {}
            with backend.autocast():
                vectors = {"": student(batch.image).features["pooled"]}
            vectors |= {} if self._searched else self._pooled(self.bank_teacher(batch))
            rows.append(vectors_of(batch, vectors))
            backend.end_step()
        (bank, label_N), (asking_MD, wanted_M) = self._gathered(rows, split), queries
        student_ND = bank.pop("")
        self._searched = self._searched or bank
        use_N, use_M, scores = label_N >= 0, wanted_M >= 0, {}
        require_images(self.val, len(use_M), int(use_M.sum()))
        if not use_N.any():
            wrong = (
                f"none of the {len(use_N)} training images that an evaluation searches"
                " has a label"
            )
            raise DataError(
                "data.labels",
                wrong,
                "At least one",
                "Label more, or set data.labels=none",
            )
        for name, bank_ND in {"": student_ND, **self._searched}.items():
            for kind, classify in (("knn", nearest), ("probe", ridge)):
                votes_MC = classify(
                    bank_ND[use_N],
                    label_N[use_N],
                    asking_MD[name][use_M],
                    self.num_classes,
                )
                self._right[_key(name, kind)] = right_M = (
                    votes_MC.argmax(-1) == wanted_M[use_M]
                )
                scores[_key(name, kind)] = right_M.double().mean().item()
        if PROJECTED in asking_MD:
            student_MD, teacher_MD = (
                asking_MD[name][use_M] for name in (PROJECTED, TEACHER)
            )
            index_ND = self._searched[TEACHER][use_N]
            right, scores["found"] = recalled(
                index_ND, label_N[use_N], student_MD, teacher_MD, wanted_M[use_M]
            )
            self._right |= right
            scores |= {
                key: right_M.double().mean().item() for key, right_M in right.items()
            }
        return scores

    def _pooled(self, teacher: Outputs) -> dict[str, Tensor]:
        names = [
            TEACHER,
            *(f"teacher_{number}" for number in range(2, self.members + 1)),
        ]
        return {
            name: teacher.of(member).features["pooled"]
            for member, name in enumerate(names)
        }


def _key(model: str, score: str) -> str:
    """Return the key of a score of a model: "knn", "teacher_knn", "teacher_knn_2"."""
    who, _, number = model.partition("_")
    return "_".join(filter(None, (who, score, number)))


def recalled(
    bank_ND: Tensor,
    label_N: Tensor,
    asking_MD: Tensor,
    teacher_MD: Tensor,
    wanted_M: Tensor,
) -> tuple[dict[str, Tensor], float]:
    """Search in a teacher's index with a student's vectors, all of length 1.

    Return for each query whether one of the `RECALLED` nearest has its class (Recall@K,
    arXiv:1511.06452), bool [M], for the student (`recall`) and for the teacher's own
    vectors; and the share of the teacher's results that the student finds too.
    """
    count, right, found = min(RECALLED, len(bank_ND)), [], []
    for own_BD, other_BD, wanted_B in zip(
        *(one.split(1024) for one in (asking_MD, teacher_MD, wanted_M)), strict=True
    ):
        near_2BK = torch.stack(
            [(one_BD @ bank_ND.T).topk(count).indices for one_BD in (own_BD, other_BD)]
        )
        right.append((label_N[near_2BK] == wanted_B[:, None]).any(-1))
        found.append(
            (near_2BK[0, :, :, None] == near_2BK[1, :, None, :]).any(2).double().mean(1)
        )
    student_M, teacher_M = torch.cat(right, dim=1)
    return {"recall": student_M, "teacher_recall": teacher_M}, torch.cat(
        found
    ).mean().item()


def nearest(
    bank_ND: Tensor, label_N: Tensor, asking_MD: Tensor, num_classes: int
) -> Tensor:
    """Return the votes [M, C] of the nearest neighbours of unit vectors.

    DINO (arXiv:2104.14294) after arXiv:1805.01978: the `NEIGHBOURS` nearest by cosine
    vote for their class, each with exp(cosine / `TEMPERATURE`).
    """
    votes = []
    for part_BD in asking_MD.split(1024):
        cosine_BK, near_BK = (part_BD @ bank_ND.T).topk(min(NEIGHBOURS, len(bank_ND)))
        counts_BC = torch.zeros(len(part_BD), num_classes)
        votes.append(
            counts_BC.scatter_add_(1, label_N[near_BK], (cosine_BK / TEMPERATURE).exp())
        )
    return torch.cat(votes) if votes else torch.zeros(0, num_classes)


def ridge(
    bank_ND: Tensor, label_N: Tensor, asking_MD: Tensor, num_classes: int
) -> Tensor:
    """Return the scores [M, C] of a linear probe: ridge regression of the classes'
    indicators, in float64.
    """
    # The penalty in `STRENGTHS` with the smallest leave-one-out squared error is used,
    # by the closed form: residual / (1 - leverage).
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
        error = (
            (
                (y_NC - turned_ND @ candidate_DC)
                / (1 - leverage_N).clamp_min(1e-9)[:, None]
            )
            .square()
            .mean()
            .item()
        )
        if error < best:
            best, weights_DC = error, candidate_DC
    return (asking_MD.double() - mean_D) @ basis_DD @ weights_DC + shares_C
