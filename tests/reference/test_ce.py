from __future__ import annotations

import pytest
import torch

from kd.losses import ce
from kd.types import Dims

DIMS = Dims(0, 0, 0)


def one_hot(label_B, num_classes):
    return (torch.arange(num_classes) == label_B[:, None]).double()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_equals_cross_entropy_with_a_mixed_and_smoothed_target(agree, smoothing):
    def formula(student, teacher, batch):
        C = student.logits.shape[1]
        lam_B1 = batch.lam.double()[:, None]
        target_BC = lam_B1 * one_hot(batch.label, C) + (1 - lam_B1) * one_hot(batch.partner_label, C)
        target_BC = (1 - smoothing) * target_BC + smoothing / C
        q_BC = student.logits.exp() / student.logits.exp().sum(dim=1, keepdim=True)
        return -(target_BC * q_BC.log()).sum(dim=1)

    agree(ce.build(ce.Options(label_smoothing=smoothing), DIMS), formula)


def test_gradient_is_probability_minus_target(outputs):
    student, teacher, batch = outputs
    logits = student.logits.clone().requires_grad_()
    ce.build(ce.Options(), DIMS)(type(student)(logits), teacher, batch).sum().backward()
    C = logits.shape[1]
    target_BC = batch.lam[:, None] * one_hot(batch.label, C) + (1 - batch.lam)[:, None] * one_hot(
        batch.partner_label, C
    )
    expected_BC = student.logits.double().softmax(dim=1) - target_BC
    torch.testing.assert_close(logits.grad.double(), expected_BC, rtol=0, atol=1e-6)


@pytest.mark.parametrize("smoothing", [-0.1, 1.1])
def test_rejects_a_smoothing_outside_0_to_1(smoothing):
    with pytest.raises(ValueError, match=f"label_smoothing must be from 0 to 1, is {smoothing}"):
        ce.Options(label_smoothing=smoothing)
