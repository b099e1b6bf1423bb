import pytest
import torch

from kd.core.types import Dims, Outputs
from kd.parts.losses import dkd, kl

DIMS = Dims(0, 0, 0)


def divergence(p, q):
    return (p * (p / q).log()).sum()


@pytest.mark.parametrize(
    ("alpha", "beta", "temperature"),
    [(1.0, 8.0, 4.0), (1.0, 0.5, 1.0), (0.0, 1.0, 2.0)],
)
def test_equals_equation_7(agree, alpha, beta, temperature):
    def formula(student, teacher, batch):
        rows = []
        for s, t, y in zip(
            student.logits, teacher.logits, batch.label.tolist(), strict=True
        ):
            q = (s / temperature).softmax(dim=0)
            p = (t / temperature).softmax(dim=0)
            target = divergence(
                torch.stack([p[y], 1 - p[y]]), torch.stack([q[y], 1 - q[y]])
            )
            non_targets = [c for c in range(len(s)) if c != y]
            non_target = divergence(
                p[non_targets] / p[non_targets].sum(),
                q[non_targets] / q[non_targets].sum(),
            )
            rows.append(temperature**2 * (alpha * target + beta * non_target))
        return torch.stack(rows)

    agree(
        dkd.build(dkd.Options(alpha=alpha, beta=beta, temperature=temperature), DIMS),
        formula,
    )


def test_decomposes_plain_distillation(outputs):
    # Equation 6: KL = TCKD + (1 - p_y) * NCKD.
    student, teacher, batch = outputs
    target_B = dkd.DKD(alpha=1.0, beta=0.0, temperature=1.0)(student, teacher, batch)
    other_B = dkd.DKD(alpha=0.0, beta=1.0, temperature=1.0)(student, teacher, batch)
    p_B = teacher.logits.softmax(dim=1).gather(1, batch.label[:, None]).squeeze(1)
    expected_B = kl.KL(temperature=1.0)(student, teacher, batch)
    torch.testing.assert_close(
        target_B + (1 - p_B) * other_B, expected_B, rtol=1e-5, atol=1e-5
    )


def test_is_zero_with_zero_gradient_when_student_equals_teacher(outputs):
    _, teacher, batch = outputs
    logits = teacher.logits.clone().requires_grad_()
    loss_B = dkd.build(dkd.Options(temperature=1.0), DIMS)(
        Outputs(logits), teacher, batch
    )
    loss_B.sum().backward()
    torch.testing.assert_close(loss_B, torch.zeros_like(loss_B), rtol=0, atol=1e-5)
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits), rtol=0, atol=1e-5)


@pytest.mark.parametrize("logit", [-1e4, 1e4])
def test_other_classes_do_not_see_the_labels_logit(outputs, logit):
    student, teacher, batch = outputs
    loss = dkd.DKD(alpha=0.0, beta=1.0, temperature=1.0)
    moved = [
        Outputs(o.logits.scatter(1, batch.label[:, None], logit))
        for o in (student, teacher)
    ]
    torch.testing.assert_close(
        loss(*moved, batch), loss(student, teacher, batch), rtol=1e-5, atol=1e-5
    )


def test_a_common_offset_of_the_logits_changes_nothing(outputs):
    student, teacher, batch = outputs
    loss = dkd.build(dkd.Options(), DIMS)
    # On a grid of 1/16, so that moving them by 8192 is exact in float32.
    near = [Outputs((16 * o.logits).round() / 16) for o in (student, teacher)]
    far = [Outputs(o.logits - 8192) for o in near]
    torch.testing.assert_close(
        loss(*far, batch), loss(*near, batch), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("shape", [(4, 2)], indirect=True)
def test_two_classes_have_no_other_class(outputs):
    student, teacher, batch = outputs
    logits = student.logits.clone().requires_grad_()
    loss_B = dkd.DKD(alpha=0.0, beta=8.0, temperature=1.0)(
        Outputs(logits), teacher, batch
    )
    loss_B.sum().backward()
    assert (loss_B == 0).all()
    assert (logits.grad == 0).all()
