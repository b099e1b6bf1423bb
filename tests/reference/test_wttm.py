import pytest
import torch

from kd.core.types import Dims, Outputs
from kd.parts.losses import kl, wttm

DIMS = Dims(0, 0, 0)


@pytest.mark.parametrize("gamma", [0.1, 0.2, 0.8, 1.5])
def test_equals_wttm_2024(agree, gamma):
    def formula(student, teacher, batch):
        q_BC = student.logits.softmax(dim=1)
        p_BC = teacher.logits.softmax(dim=1)
        power_BC = p_BC**gamma
        sum_B1 = power_BC.sum(dim=1, keepdim=True)
        transformed_BC = power_BC / sum_B1
        return sum_B1.squeeze(1) * (transformed_BC * (transformed_BC / q_BC).log()).sum(
            dim=1
        )

    agree(wttm.build(wttm.Options(gamma=gamma), DIMS), formula)


def test_exponent_one_is_plain_distillation(outputs):
    student, teacher, batch = outputs
    found_B = wttm.WTTM(gamma=1.0)(student, teacher, batch)
    torch.testing.assert_close(
        found_B, kl.KL(temperature=1.0)(student, teacher, batch), rtol=1e-5, atol=1e-5
    )


def test_is_zero_when_the_student_equals_the_softened_teacher(outputs):
    _, teacher, batch = outputs
    loss_B = wttm.WTTM(gamma=0.5)(Outputs(0.5 * teacher.logits), teacher, batch)
    torch.testing.assert_close(loss_B, torch.zeros_like(loss_B), rtol=0, atol=1e-5)


def test_the_weight_is_largest_for_a_uniform_teacher_and_1_for_a_certain_one(outputs):
    student, _, batch = outputs
    C = student.logits.shape[1]
    uniform = torch.zeros_like(student.logits)
    certain = 1e4 * (torch.arange(C) == batch.label[:, None])
    log_q_BC = student.logits.double().log_softmax(dim=1)
    by_uniform_B = C**0.8 * (-log_q_BC.mean(dim=1) - torch.tensor(float(C)).log())
    by_certain_B = -log_q_BC.gather(1, batch.label[:, None]).squeeze(1)
    loss = wttm.WTTM(gamma=0.2)
    torch.testing.assert_close(
        loss(student, Outputs(uniform), batch).double(),
        by_uniform_B,
        rtol=1e-5,
        atol=1e-5,
    )
    torch.testing.assert_close(
        loss(student, Outputs(certain), batch).double(),
        by_certain_B,
        rtol=1e-5,
        atol=1e-5,
    )
