"""Losses and scores of label sets against their formulas in plain NumPy, float64.

Shape legend: B images of a batch, N images, C classes.
"""

import numpy as np
import pytest
import torch

from kd.core.evaluation import Evaluation, Split
from kd.core.types import Batch, Dims, Outputs, Plan
from kd.parts.backends.cpu import CPU
from kd.parts.losses import bce, binary_kl
from kd.parts.tasks import label_sets
from kd.parts.tasks.label_sets import (
    FEWEST,
    average_precision,
    divergence,
    exchanged_f1,
    jaccard,
    score,
    thresholds,
)

B = 7
C = 5
GENERATOR = np.random.default_rng(0)
STUDENT, TEACHER = (GENERATOR.normal(0, 3, (B, C)).astype(np.float32) for _ in range(2))
LABEL, PARTNER = (GENERATOR.integers(0, 2, (B, C)).astype(np.int8) for _ in range(2))
LAM = GENERATOR.random(B).astype(np.float32)


def sigmoid(logits) -> np.ndarray:
    return 1 / (1 + np.exp(-np.asarray(logits, np.float64)))


def batch() -> Batch:
    label = torch.from_numpy(LABEL)
    partner = torch.from_numpy(PARTNER)
    unmixed = Batch.of(torch.zeros(B, 3, 1, 1, dtype=torch.uint8), label)
    return Batch(
        unmixed.ids,
        unmixed.image,
        label,
        partner,
        torch.from_numpy(LAM),
        unmixed.weight,
    )


def outputs(logits: np.ndarray) -> Outputs:
    return Outputs(torch.from_numpy(logits).requires_grad_())


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_bce_is_the_formula(smoothing):
    lam = LAM[:, None].astype(np.float64)
    target = (1 - smoothing) * (lam * LABEL + (1 - lam) * PARTNER) + smoothing / 2
    p = sigmoid(STUDENT)
    student = outputs(STUDENT)
    expected = -(target * np.log(p) + (1 - target) * np.log(1 - p)).sum(1)
    loss_B = bce.build(bce.Options(label_smoothing=smoothing), Dims(C, 0, 0))(
        student, outputs(TEACHER), batch()
    )
    np.testing.assert_allclose(loss_B.detach().numpy(), expected, rtol=1e-5)
    loss_B.sum().backward()
    np.testing.assert_allclose(student.logits.grad.numpy(), p - target, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_binary_kl_is_the_formula(temperature):
    p = sigmoid(TEACHER / temperature)
    q = sigmoid(STUDENT / temperature)
    expected = temperature**2 * (
        p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    ).sum(1)
    student = outputs(STUDENT)
    loss_B = binary_kl.build(binary_kl.Options(temperature=temperature), Dims(C, 0, 0))(
        student, outputs(TEACHER), batch()
    )
    np.testing.assert_allclose(loss_B.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    loss_B.sum().backward()
    np.testing.assert_allclose(
        student.logits.grad.numpy(), temperature * (q - p), atol=1e-5
    )


def plain_precision(scores: np.ndarray, truth: np.ndarray) -> float:
    """The sum over distinct thresholds of precision x gain in recall, one at a time."""
    total = 0.0
    before = 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        chosen = scores >= threshold
        recall = (chosen & truth).sum() / truth.sum()
        total += (recall - before) * (chosen & truth).sum() / chosen.sum()
        before = recall
    return total


def plain_f1(chosen: np.ndarray, truth: np.ndarray) -> float:
    hits = (chosen & truth).sum()
    return 0.0 if not hits else 2 / (chosen.sum() / hits + truth.sum() / hits)


@pytest.mark.parametrize("ties", [False, True])
def test_precision_and_f1_are_the_formulas(ties):
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (60, 6))
    logits = np.round(logits) if ties else logits
    truth = rng.random((60, 6)) < 0.3
    truth[:, 2] = False  # a class that no image shows
    truth[:, 5] = True  # and one that all do
    scores = score(torch.from_numpy(logits), torch.from_numpy(truth))
    classes = [c for c in range(6) if truth[:, c].any()]
    per_class = [plain_precision(logits[:, c], truth[:, c]) for c in classes]
    assert scores["map"] == pytest.approx(np.mean(per_class), abs=1e-12)
    assert scores["f1_macro"] == pytest.approx(
        np.mean([plain_f1(logits[:, c] > 0, truth[:, c]) for c in classes])
    )
    assert scores["f1_micro"] == pytest.approx(plain_f1(logits > 0, truth))
    p = sigmoid(logits)
    assert scores["nll"] == pytest.approx(
        -(np.where(truth, np.log(p), np.log(1 - p))).sum(1).mean()
    )


def test_precision_is_1_for_a_perfect_order_and_the_formula_for_a_reversed_one():
    truth = torch.tensor([[True], [True], [False], [False]])
    scores = torch.tensor([[4.0], [3.0], [2.0], [1.0]])
    assert average_precision(scores, truth).item() == 1.0
    assert average_precision(-scores, truth).item() == pytest.approx(
        (1 / 3 + 2 / 4) / 2
    )


def test_agreement_is_the_share_of_common_labels():
    first = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]]).bool()
    second = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]]).bool()
    assert jaccard(first, second) == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert divergence(torch.zeros(2, 3), torch.zeros(2, 3)) == 0.0


def test_a_threshold_has_the_largest_f1_that_any_has():
    rng = np.random.default_rng(2)
    logits = np.round(rng.normal(0, 1, (80, 4)), 1)  # with ties
    truth = rng.random((80, 4)) < sigmoid(2 * logits - 1)
    truth[:, 2] = np.arange(80) < FEWEST - 1
    truth[:, 3] = np.arange(80) >= FEWEST - 1
    chosen, enough = thresholds(torch.from_numpy(logits), torch.from_numpy(truth))
    assert enough.tolist() == [True, True, False, False]
    assert (
        chosen[2] == chosen[3] == 0.5
    )  # too few images that show the class, or that do not
    for c in range(2):
        candidates = [0.0, *sigmoid(np.unique(logits[:, c]))]
        best = max(
            plain_f1(sigmoid(logits[:, c]) > threshold, truth[:, c])
            for threshold in candidates
        )
        assert plain_f1(
            sigmoid(logits[:, c]) > chosen[c].item(), truth[:, c]
        ) == pytest.approx(best)


def test_the_f1_of_thresholds_is_counted_on_images_that_chose_nothing():
    """Labels of pure chance: on the images that choose, a threshold looks better than
    it is on any others.
    """
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(0, 1, (400, 6)))
    truth = torch.from_numpy(rng.random((400, 6)) < 0.1)
    chosen, _ = thresholds(logits, truth)
    same = np.mean(
        [
            plain_f1((logits[:, c].sigmoid() > chosen[c]).numpy(), truth[:, c].numpy())
            for c in range(6)
        ]
    )
    fresh = torch.from_numpy(rng.random((40_000, 6)) < 0.1)
    new = torch.from_numpy(rng.normal(0, 1, (40_000, 6))).sigmoid() > chosen
    true = np.mean([plain_f1(new[:, c].numpy(), fresh[:, c].numpy()) for c in range(6)])
    exchanged = exchanged_f1(logits, truth).mean().item()
    assert same > true + 0.03
    assert abs(exchanged - true) < same - true


class Fixed:
    """A loader, a student and a teacher: four batches of answers that are known."""

    unreadable: set[int] = set()
    training = False

    def __init__(self, logits: torch.Tensor, truth: torch.Tensor) -> None:
        self.logits = logits
        self.truth = truth

    def epoch(self, plan: Plan, view: int, start: int = 0):
        for ids in torch.arange(len(self.logits)).split(50):
            image = ids.to(torch.float32)[:, None, None, None].expand(-1, 3, 1, 1)
            yield Batch.of(image, self.truth[ids].to(torch.int8), ids)

    def eval(self) -> None: ...

    def train(self, mode: bool) -> None: ...

    def __call__(self, image) -> Outputs:
        return Outputs(self.logits[image[:, 0, 0, 0].long()])


@pytest.mark.slow
def test_the_interval_of_map_holds_that_of_all_images():
    """Of 60 samples of 200 images at least 53, where 20 show a class: their mAP is too
    high by itself.
    """
    rng = np.random.default_rng(4)
    truth = torch.from_numpy(rng.random((20_000, 4)) < 0.1)
    logits = torch.from_numpy(rng.normal(0, 1, (20_000, 4))) + truth
    expected = score(logits, truth)["map"]
    hits = 0
    for number in range(60):
        ids = torch.from_numpy(np.random.default_rng(number).integers(0, 20_000, 200))
        fixed = Fixed(logits[ids], truth[ids])
        plan = Plan(torch.arange(200), torch.ones(200))
        evaluator = label_sets.build(label_sets.Options()).evaluator(
            Evaluation(CPU("fp32", 60, 1), Split(fixed, plan), None, 4)
        )
        row = evaluator(fixed)
        samples = evaluator.samples()
        assert samples["map"].value == pytest.approx(row["map"])
        low, high = samples["map"].interval()
        hits += low <= expected <= high
    assert hits >= 53


def test_unlabelled_images_count_where_the_teacher_alone_is_compared():
    """mAP of the two labelled images; agreement and KL of all four."""
    teacher, student = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    label = torch.tensor([[1, 0, 0], [0, 1, 1], [-1, -1, -1], [-1, -1, -1]])
    plan = Plan(torch.arange(4), torch.ones(4))
    setting = Evaluation(CPU("fp32", 60, 1), Split([], plan), object(), 3, True)
    evaluator = label_sets.build(label_sets.Options()).evaluator(setting)
    rows = {
        "ids": torch.arange(4),
        "seen": torch.ones(4, dtype=torch.bool),
        "student": student,
        "teacher": teacher,
    }
    metrics = evaluator._finish([{**rows, "label": label}])
    assert metrics["agreement"] == pytest.approx(jaccard(teacher > 0, student > 0))
    share = teacher.double().sigmoid()
    student_share = student.double().sigmoid()
    each = (
        share * (share / student_share).log()
        + (1 - share) * ((1 - share) / (1 - student_share)).log()
    )
    assert metrics["kl"] == pytest.approx(each.sum(1).mean().item(), rel=1e-5)
    assert metrics["map"] == pytest.approx(
        score(student[:2].double(), label[:2] > 0)["map"]
    )
    counted = label_sets.build(label_sets.Options()).graph_scores
    assert counted(student, teacher, label).score == pytest.approx(metrics["map"])
    same = int((student.argmax(1) == teacher.argmax(1)).sum())
    assert counted(student, teacher, label[2:].expand(2, -1).repeat(2, 1)).facts == {
        "same_top1": same
    }
