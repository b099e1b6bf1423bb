"""Compare embeddings with the teacher's, and score them by neighbours and a probe.

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
from kd.parts.tasks._logits import Answers, gather_images, require_images

NEIGHBOURS = 20  # neighbours of k-NN, as in DINO (arXiv:2104.14294)
TEMPERATURE = 0.07  # of their votes, as there
RECALLED = 10  # results of a search in the teacher's index
# names of vectors: the student's in the first teacher's space, and that teacher's own
PROJECTED = "projected"
TEACHER = "teacher"
STRENGTHS = tuple(10.0**power for power in range(-5, 3))
"""The probe's penalties as shares of the mean eigenvalue; the best by leave-one-out is
used.
"""
LABELS = "labels"
SCORES = Scores(
    own=(
        Column("knn", "nearest neighbours"),
        Column("probe", "linear probe"),
        Column("recall", "recall@10 in the teacher's index"),
    ),
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

    name = "embedding"
    logits = ""
    label = "class"
    problem_type = ""
    label_loss = "ce"
    scores = SCORES
    keeps_topk = True

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
        title = "the mean cosine with PyTorch's vectors"
        return GraphScores({"cosine": cosine}, cosine, title, summary)


def build(options: Options) -> Embedding:
    """Build the task."""
    return Embedding()


def batch_row(batch: Batch, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch's vectors [B, D] by model, with length 1, for `gather_images`."""
    row = {
        name: F.normalize(value_BD.float(), dim=1) for name, value_BD in vectors.items()
    }
    row[LABELS] = batch.label
    row["ids"] = batch.ids
    row["seen"] = batch.weight > 0
    return row


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
        self.backend = setting.backend
        self.val = setting.val
        self.loader = setting.val.loader
        self.answers = Answers(setting.teacher, setting.backend)
        self.agreement = setting.agreement
        self.bank_teacher = setting.bank_teacher or setting.teacher
        self.num_classes = setting.num_classes
        self.members = setting.members
        self.bank: Split | None = None
        if setting.bank is not None and setting.labelled and setting.num_classes > 1:
            self.bank = setting.bank()
        # whether neighbours and the probe are scored
        self.labelled = self.bank is not None
        self.selection_metric = scores.selection_metric(self.labelled).key
        self._bank_vectors: dict[str, Tensor] = {}  # the teachers'
        # of the last evaluation: correct images, bool [M] by key
        self._right: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(
        self, student: nn.Module, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        was_training = student.training
        student.eval()
        try:
            values = self._scores(student, stop)
        finally:
            student.train(was_training)
        if not values:
            return {}
        # Another processor may round differently.
        shared = numbers_of_rank_0(self.backend, [*values.values()])
        return dict(zip(values, shared, strict=True))

    def of(self, teacher: Teacher) -> EmbeddingEvaluator:
        evaluator = copy.copy(self)
        evaluator.answers = Answers(teacher, self.backend)
        evaluator.bank_teacher = teacher
        evaluator._bank_vectors = {}
        evaluator._right = {}
        return evaluator

    def samples(self) -> dict[str, Samples]:
        return {
            key: Samples(right_M.double().mean().item(), right=right_M.cpu().numpy())
            for key, right_M in self._right.items()
        }

    def _scores(self, student: nn.Module, stop: Callable[[], bool]) -> dict[str, float]:
        backend = self.backend
        queries: list[dict[str, Tensor]] = []
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
            vectors = {"": outputs.features["pooled"]}
            projected_BD = self.projected(outputs)
            if projected_BD is not None and self.bank is not None:
                vectors[PROJECTED] = projected_BD
            queries.append(batch_row(batch, vectors | self._pooled(teacher)))
            backend.end_step()
        total, images = backend.reduce_sum(sums).tolist()
        require_images(self.val, int(images))
        agreement = {"agreement": total / images}
        if self.bank is None:
            return agreement
        scores = self._search(
            student, self.bank, self._gather_vectors(queries, self.val), stop
        )
        return agreement | scores if scores else {}

    def _gather_vectors(
        self, rows: list[dict[str, Tensor]], split: Split
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the vectors [N, D] by model, and the labels [N] (-1: unlabelled)."""
        vectors = gather_images(rows, split, self.backend)
        del vectors["ids"]
        seen_N = vectors.pop("seen")[:, 0] > 0
        label_N = vectors.pop(LABELS)[:, 0]
        return vectors, torch.where(seen_N, label_N, -1.0).long()

    def _search(
        self,
        student: nn.Module,
        split: Split,
        queries: tuple[dict[str, Tensor], Tensor],
        stop: Callable[[], bool],
    ) -> dict[str, float]:
        """Return the accuracies of k-NN and probe on validation images.

        They use training images. {} if `stop` ended it.
        """
        backend = self.backend
        rows: list[dict[str, Tensor]] = []
        for batch in backend.put(split.loader.epoch(split.plan, view=0)):
            if stop():
                return {}
            with backend.autocast():
                vectors = {"": student(batch.image).features["pooled"]}
            if not self._bank_vectors:
                vectors |= self._pooled(self.bank_teacher(batch))
            rows.append(batch_row(batch, vectors))
            backend.end_step()
        bank, label_N = self._gather_vectors(rows, split)
        student_ND = bank.pop("")
        self._bank_vectors = self._bank_vectors or bank
        labelled_N = label_N >= 0
        label_N = label_N[labelled_N]
        query, label_M = queries
        labelled_M = label_M >= 0
        require_images(self.val, len(label_M), int(labelled_M.sum()))
        if not len(label_N):
            wrong = (
                f"none of the {len(labelled_N)} training images that an evaluation"
                " searches has a label"
            )
            remedy = "Label more, or set data.labels=none"
            raise DataError("data.labels", wrong, "At least one", remedy)
        query = {name: query_MD[labelled_M] for name, query_MD in query.items()}
        label_M = label_M[labelled_M]
        scores = {}
        for name, bank_ND in {"": student_ND, **self._bank_vectors}.items():
            bank_ND = bank_ND[labelled_N]
            for kind, classify in (("knn", nearest), ("probe", ridge)):
                votes_MC = classify(bank_ND, label_N, query[name], self.num_classes)
                right_M = votes_MC.argmax(-1) == label_M
                self._right[_key(name, kind)] = right_M
                scores[_key(name, kind)] = right_M.double().mean().item()
        if PROJECTED in query:
            index_ND = self._bank_vectors[TEACHER][labelled_N]
            right, scores["found"] = recalled(
                index_ND, label_N, query[PROJECTED], query[TEACHER], label_M
            )
            self._right |= right
            for key, right_M in right.items():
                scores[key] = right_M.double().mean().item()
        return scores

    def _pooled(self, teacher: Outputs) -> dict[str, Tensor]:
        """Return each teacher's vectors [B, D] as "teacher", "teacher_2" and so on."""
        return {
            f"{TEACHER}_{i + 1}" if i else TEACHER: teacher.of(i).features["pooled"]
            for i in range(self.members)
        }


def _key(model: str, score: str) -> str:
    """Return the key of a score of a model: "knn", "teacher_knn", "teacher_knn_2"."""
    prefix, _, number = model.partition("_")
    return "_".join(filter(None, (prefix, score, number)))


def recalled(
    bank_ND: Tensor,
    label_N: Tensor,
    student_MD: Tensor,
    teacher_MD: Tensor,
    label_M: Tensor,
) -> tuple[dict[str, Tensor], float]:
    """Search in a teacher's index with a student's vectors, all of length 1.

    Return for each query whether one of the `RECALLED` nearest has its class (Recall@K,
    arXiv:1511.06452), bool [M], for the student (`recall`) and for the teacher's own
    vectors; and the share of the teacher's results that the student finds too.
    """
    count = min(RECALLED, len(bank_ND))
    right = []
    shares = []
    chunks = (tensor.split(1024) for tensor in (student_MD, teacher_MD, label_M))
    for student_BD, teacher_BD, label_B in zip(*chunks, strict=True):
        near_2BK = torch.stack(
            [
                (query_BD @ bank_ND.T).topk(count).indices
                for query_BD in (student_BD, teacher_BD)
            ]
        )
        right.append((label_N[near_2BK] == label_B[:, None]).any(-1))
        in_both_BKK = near_2BK[0, :, :, None] == near_2BK[1, :, None, :]
        shares.append(in_both_BKK.any(2).double().mean(1))
    student_M, teacher_M = torch.cat(right, dim=1)
    share = torch.cat(shares).mean().item()
    return {"recall": student_M, "teacher_recall": teacher_M}, share


def nearest(
    bank_ND: Tensor, label_N: Tensor, query_MD: Tensor, num_classes: int
) -> Tensor:
    """Return the votes [M, C] of the nearest neighbours of unit vectors.

    DINO (arXiv:2104.14294) after arXiv:1805.01978: the `NEIGHBOURS` nearest by cosine
    vote for their class, each with exp(cosine / `TEMPERATURE`).
    """
    count = min(NEIGHBOURS, len(bank_ND))
    votes = [torch.zeros(0, num_classes)]
    for query_BD in query_MD.split(1024):
        cosine_BK, near_BK = (query_BD @ bank_ND.T).topk(count)
        votes_BC = torch.zeros(len(query_BD), num_classes)
        votes_BC.scatter_add_(1, label_N[near_BK], (cosine_BK / TEMPERATURE).exp())
        votes.append(votes_BC)
    return torch.cat(votes)


def ridge(
    bank_ND: Tensor, label_N: Tensor, query_MD: Tensor, num_classes: int
) -> Tensor:
    """Return the scores [M, C] of a linear probe, by ridge regression in float64.

    The targets are the classes' indicators. The penalty in `STRENGTHS` with the
    smallest leave-one-out squared error is used, by the closed form: residual /
    (1 - leverage).
    """
    mean_D = bank_ND.double().mean(0)
    target_NC = F.one_hot(label_N, num_classes).double()
    shares_C = target_NC.mean(0)
    x_ND = bank_ND.double() - mean_D
    y_NC = target_NC - shares_C
    values_D, basis_DD = torch.linalg.eigh(x_ND.T @ x_ND)
    values_D = values_D.clamp_min(0)
    turned_ND = x_ND @ basis_DD
    projected_DC = turned_ND.T @ y_NC
    smallest_error = float("inf")
    weights_DC = torch.zeros_like(projected_DC)
    for strength in STRENGTHS:
        inverse_D = 1 / (values_D + strength * values_D.mean().clamp_min(1e-12))
        candidate_DC = inverse_D[:, None] * projected_DC
        leverage_N = (turned_ND.square() * inverse_D).sum(1) + 1 / len(x_ND)
        residual_NC = y_NC - turned_ND @ candidate_DC
        residual_NC /= (1 - leverage_N).clamp_min(1e-9)[:, None]
        error = residual_NC.square().mean().item()
        if error < smallest_error:
            smallest_error = error
            weights_DC = candidate_DC
    return (query_MD.double() - mean_D) @ basis_DD @ weights_DC + shares_C
