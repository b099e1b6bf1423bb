from __future__ import annotations

import pytest
import torch

from kd.losses import zscore
from kd.types import Dims, Outputs

DIMS = Dims(0, 0, 0)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_equals_logit_standardization_2024(agree, temperature):
    def standardize(x_BC):
        C = x_BC.shape[1]
        mean_B1 = x_BC.sum(dim=1, keepdim=True) / C
        variance_B1 = ((x_BC - mean_B1) ** 2).sum(dim=1, keepdim=True) / (C - 1)
        return (x_BC - mean_B1) / (variance_B1.sqrt() + 1e-7)

    def formula(student, teacher, batch):
        q_BC = (standardize(student.logits) / temperature).softmax(dim=1)
        p_BC = (standardize(teacher.logits) / temperature).softmax(dim=1)
        return temperature**2 * (p_BC * (p_BC / q_BC).log()).sum(dim=1)

    agree(zscore.build(zscore.Options(temperature=temperature), DIMS), formula)


def test_scale_and_offset_of_the_logits_do_not_matter(outputs):
    _, teacher, batch = outputs
    student = Outputs(0.25 * teacher.logits + 7)
    loss_B = zscore.build(zscore.Options(), DIMS)(student, teacher, batch)
    torch.testing.assert_close(loss_B, torch.zeros_like(loss_B), rtol=0, atol=1e-5)


def test_rejects_a_temperature_that_is_not_positive():
    with pytest.raises(ValueError, match="temperature must be finite and > 0, is -1"):
        zscore.Options(temperature=-1.0)
