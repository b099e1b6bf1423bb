import torch

from kd.core.types import Dims, Outputs
from kd.parts.losses import cckd

DIMS = Dims(0, 6, 10)


def similarity(vectors_BD, i, j):
    """Return the cosine of two rows."""
    a = vectors_BD[i]
    b = vectors_BD[j]
    return (a * b).sum() / ((a**2).sum().sqrt() * (b**2).sum().sqrt())


def test_equals_the_formula(agree):
    def formula(student, teacher, batch):
        student_BD = student.features["pooled"]
        teacher_BD = teacher.features["pooled"]
        rows = range(len(student_BD))
        return torch.stack(
            [
                torch.stack(
                    [
                        (similarity(student_BD, i, j) - similarity(teacher_BD, i, j))
                        ** 2
                        for j in rows
                    ]
                ).mean()
                for i in rows
            ]
        )

    agree(cckd.build(cckd.Options(), DIMS), formula)


def test_a_turned_and_scaled_copy_of_the_teacher_has_no_loss(outputs):
    _, teacher, batch = outputs
    loss = cckd.build(cckd.Options(), DIMS)
    turned, _ = torch.linalg.qr(
        torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    )
    copy = Outputs(teacher.logits, {"pooled": 3 * teacher.features["pooled"] @ turned})
    torch.testing.assert_close(
        loss(copy, teacher, batch), torch.zeros(len(batch.label)), rtol=0, atol=1e-10
    )
    torch.testing.assert_close(
        loss.agreement(copy, teacher), torch.ones(len(batch.label))
    )
