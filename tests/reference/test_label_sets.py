"""Losses and scores of label sets against their formulas in plain NumPy, float64.

Shape legend: B images of a batch, N images, C classes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kd.losses import bce, binary_kl
from kd.tasks.label_sets import FEWEST, average_precision, divergence, jaccard, score, thresholds
from kd.types import Batch, Dims, Outputs

B, C = 7, 5
GENERATOR = np.random.default_rng(0)
STUDENT, TEACHER = (GENERATOR.normal(0, 3, (B, C)).astype(np.float32) for _ in range(2))
LABEL, PARTNER = (GENERATOR.integers(0, 2, (B, C)).astype(np.int8) for _ in range(2))
LAM = GENERATOR.random(B).astype(np.float32)


def sigmoid(logits) -> np.ndarray:
    return 1 / (1 + np.exp(-np.asarray(logits, np.float64)))


def batch() -> Batch:
    label, partner = torch.from_numpy(LABEL), torch.from_numpy(PARTNER)
    whole = Batch.of(torch.zeros(B, 3, 1, 1, dtype=torch.uint8), label)
    return Batch(whole.ids, whole.image, label, partner, torch.from_numpy(LAM), whole.weight)


def outputs(logits: np.ndarray) -> Outputs:
    return Outputs(torch.from_numpy(logits).requires_grad_())


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_bce_is_the_formula(smoothing):
    lam = LAM[:, None].astype(np.float64)
    target = (1 - smoothing) * (lam * LABEL + (1 - lam) * PARTNER) + smoothing / 2
    p, student = sigmoid(STUDENT), outputs(STUDENT)
    expected = -(target * np.log(p) + (1 - target) * np.log(1 - p)).sum(1)
    loss_B = bce.build(bce.Options(label_smoothing=smoothing), Dims(C, 0, 0))(student, outputs(TEACHER), batch())
    np.testing.assert_allclose(loss_B.detach().numpy(), expected, rtol=1e-5)
    loss_B.sum().backward()
    np.testing.assert_allclose(student.logits.grad.numpy(), p - target, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_binary_kl_is_the_formula(temperature):
    p, q = sigmoid(TEACHER / temperature), sigmoid(STUDENT / temperature)
    expected = temperature**2 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).sum(1)
    student = outputs(STUDENT)
    loss_B = binary_kl.build(binary_kl.Options(temperature=temperature), Dims(C, 0, 0))(
        student, outputs(TEACHER), batch()
    )
    np.testing.assert_allclose(loss_B.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    loss_B.sum().backward()
    np.testing.assert_allclose(student.logits.grad.numpy(), temperature * (q - p), atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- scores


def plain_precision(scores: np.ndarray, truth: np.ndarray) -> float:
    """The sum over distinct thresholds of precision x gain in recall, one at a time."""
    total, before = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        said = scores >= threshold
        recall = (said & truth).sum() / truth.sum()
        total += (recall - before) * (said & truth).sum() / said.sum()
        before = recall
    return total


def plain_f1(said: np.ndarray, truth: np.ndarray) -> float:
    hits = (said & truth).sum()
    return 0.0 if not hits else 2 / (said.sum() / hits + truth.sum() / hits)


@pytest.mark.parametrize("ties", [False, True])
def test_precision_and_f1_are_the_formulas(ties):
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (60, 6))
    logits = np.round(logits) if ties else logits
    truth = rng.random((60, 6)) < 0.3
    truth[:, 2], truth[:, 5] = False, True  # a class that no image shows, and one that all do
    found = score(torch.from_numpy(logits), torch.from_numpy(truth))
    shown = [c for c in range(6) if truth[:, c].any()]
    per_class = [plain_precision(logits[:, c], truth[:, c]) for c in shown]
    assert found["map"] == pytest.approx(np.mean(per_class), abs=1e-12)
    assert found["f1_macro"] == pytest.approx(np.mean([plain_f1(logits[:, c] > 0, truth[:, c]) for c in shown]))
    assert found["f1_micro"] == pytest.approx(plain_f1(logits > 0, truth))
    p = sigmoid(logits)
    assert found["nll"] == pytest.approx(-(np.where(truth, np.log(p), np.log(1 - p))).sum(1).mean())


def test_precision_of_a_perfect_and_of_a_reversed_order():
    truth = torch.tensor([[True], [True], [False], [False]])
    scores = torch.tensor([[4.0], [3.0], [2.0], [1.0]])
    assert average_precision(scores, truth).item() == 1.0
    assert average_precision(-scores, truth).item() == pytest.approx((1 / 3 + 2 / 4) / 2)


def test_agreement_is_the_share_of_common_labels():
    one = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]]).bool()
    other = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]]).bool()
    assert jaccard(one, other) == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert divergence(torch.zeros(2, 3), torch.zeros(2, 3)) == 0.0


def test_a_threshold_has_the_largest_f1_that_any_has():
    rng = np.random.default_rng(2)
    logits = np.round(rng.normal(0, 1, (80, 3)), 1)  # with ties
    truth = rng.random((80, 3)) < sigmoid(2 * logits - 1)
    truth[:, 2] = np.arange(80) < FEWEST - 1
    chosen, enough = thresholds(torch.from_numpy(logits), torch.from_numpy(truth))
    assert enough.tolist() == [True, True, False]
    assert chosen[2] == 0.5
    for c in range(2):
        candidates = [0.0, *sigmoid(np.unique(logits[:, c]))]
        best = max(plain_f1(sigmoid(logits[:, c]) > one, truth[:, c]) for one in candidates)
        assert plain_f1(sigmoid(logits[:, c]) > chosen[c].item(), truth[:, c]) == pytest.approx(best)
