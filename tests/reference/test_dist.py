import pytest
import torch

from kd.core.types import Dims, Outputs
from kd.parts.losses import dist

DIMS = Dims(0, 0, 0)


def distance(u, v):
    """Return 1 - Pearson's correlation of two vectors, with the authors' 1e-8."""
    u = u - u.sum() / len(u)
    v = v - v.sum() / len(v)
    return 1 - (u * v).sum() / ((u * u).sum().sqrt() * (v * v).sum().sqrt() + 1e-8)


@pytest.mark.parametrize(
    ("beta", "gamma", "temperature"),
    [(1.0, 1.0, 1.0), (1.0, 2.0, 4.0), (2.0, 0.0, 1.0)],
)
def test_equals_dist_2022(agree, beta, gamma, temperature):
    def formula(student, teacher, batch):
        q_BC = (student.logits / temperature).softmax(dim=1)
        p_BC = (teacher.logits / temperature).softmax(dim=1)
        inter_B = torch.stack([distance(q, p) for q, p in zip(q_BC, p_BC, strict=True)])
        intra_C = torch.stack(
            [distance(q, p) for q, p in zip(q_BC.T, p_BC.T, strict=True)]
        )
        return temperature**2 * (beta * inter_B + gamma * intra_C.mean())

    agree(
        dist.build(dist.Options(beta=beta, gamma=gamma, temperature=temperature), DIMS),
        formula,
    )


@pytest.mark.parametrize("shape", [(8, 3), (32, 10)], indirect=True)
def test_correlation_is_pearsons(outputs):
    # Without the 1e-8: torch's own correlation, where no class is so rare that it would
    # matter.
    student, teacher, batch = outputs
    q_BC = student.logits.double().softmax(dim=1)
    p_BC = teacher.logits.double().softmax(dim=1)
    inter = torch.stack(
        [
            1 - torch.corrcoef(torch.stack(pair))[0, 1]
            for pair in zip(q_BC, p_BC, strict=True)
        ]
    ).mean()
    intra = torch.stack(
        [
            1 - torch.corrcoef(torch.stack(pair))[0, 1]
            for pair in zip(q_BC.T, p_BC.T, strict=True)
        ]
    )
    loss = dist.build(dist.Options(), DIMS)(student, teacher, batch).mean()
    assert loss.item() == pytest.approx((inter + intra.mean()).item(), rel=1e-5)


@pytest.mark.parametrize("shape", [(8, 3), (32, 10)], indirect=True)
def test_is_zero_when_student_equals_teacher(outputs):
    _, teacher, batch = outputs
    loss_B = dist.build(dist.Options(), DIMS)(Outputs(teacher.logits), teacher, batch)
    torch.testing.assert_close(loss_B, torch.zeros_like(loss_B), rtol=0, atol=1e-5)
