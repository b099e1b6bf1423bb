from __future__ import annotations

import torch

from kd.losses import hard
from kd.types import Dims, Outputs

DIMS = Dims(0, 0, 0)


def test_equals_deit_2020(agree):
    def formula(student, teacher, batch):
        q_BC = student.logits.softmax(dim=1)
        choices = [row.index(max(row)) for row in teacher.logits.tolist()]
        return -torch.stack([q[choice].log() for q, choice in zip(q_BC, choices, strict=True)])

    agree(hard.build(hard.Options(), DIMS), formula)


def test_only_the_order_of_the_teacher_matters(outputs):
    student, teacher, batch = outputs
    loss = hard.build(hard.Options(), DIMS)
    softened = Outputs(teacher.logits / 10 - 5)
    torch.testing.assert_close(loss(student, teacher, batch), loss(student, softened, batch), rtol=0, atol=0)
