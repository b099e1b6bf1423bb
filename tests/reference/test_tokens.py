import pytest
import torch

from kd.core.errors import ModelError
from kd.core.types import Dims
from kd.parts.losses import tokens


def build(student=(4, 6), teacher=(9, 10)):
    torch.manual_seed(0)
    return tokens.build(tokens.Options(), Dims(0, 0, 0, student, teacher))


def coarser(tokens_BND):
    """Average a 3 x 3 grid to 2 x 2 by a tent filter, written out.

    The filter is 2 * 3 / 2 = 3 pixels wide, so a new point at 0.25 or 0.75 of the side
    weighs the pixel centres at 1/6, 3/6 and 5/6 by 1 - |distance| / 0.5, and the
    weights are divided by their sum.
    """
    centres = torch.tensor([1 / 6, 3 / 6, 5 / 6], dtype=torch.float64)
    weights = torch.stack(
        [(1 - (centres - at).abs() / 0.5).clamp(min=0) for at in (0.25, 0.75)]
    )
    weights = weights / weights.sum(dim=1, keepdim=True)
    grid = tokens_BND.double().unflatten(1, (3, 3))
    return torch.einsum("xi,yj,bijd->bxyd", weights, weights, grid).flatten(1, 2)


def test_equals_the_formula_where_the_teachers_grid_is_finer(agree):
    loss = build()
    weight, bias = (parameter.detach().double() for parameter in loss.parameters())

    def formula(student, teacher, batch):
        projected = student.features["tokens"] @ weight.T + bias
        target = coarser(teacher.features["tokens"])
        lengths = (projected**2).sum(dim=2).sqrt() * (target**2).sum(dim=2).sqrt()
        cosine = (projected * target).sum(dim=2) / lengths
        gap = (projected - target).abs()
        smooth = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5)
        return (0.9 * (1 - cosine) + 0.1 * smooth.mean(dim=2)).mean(dim=1)

    agree(loss, formula)


def test_equals_the_formula_where_the_students_grid_is_finer(outputs):
    student, teacher, batch = outputs
    loss = build(student=(9, 10), teacher=(4, 6))
    with torch.no_grad():
        reduced = (
            coarser(teacher.features["tokens"]) @ loss.project.weight.double().T
            + loss.project.bias.double()
        )
        target = student.features["tokens"].double()
        cosine = torch.nn.functional.cosine_similarity(reduced, target, dim=2).mean(
            dim=1
        )
    torch.testing.assert_close(
        loss.agreement(teacher, student).double(), cosine, rtol=0, atol=1e-5
    )
    assert loss(teacher, student, batch).shape == batch.label.shape


@pytest.mark.parametrize(
    ("student", "teacher", "message"),
    [
        ((0, 0), (4, 6), "the student has no features"),
        ((4, 6), (0, 0), "the teacher has no features"),
        ((4, 6), (197, 8), "the teacher gives 197 tokens, which are not a square grid"),
    ],
)
def test_refuses_what_has_no_grid(student, teacher, message):
    with pytest.raises(ModelError, match=rf"^losses\.tokens: {message}"):
        build(student, teacher)
