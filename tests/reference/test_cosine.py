import pytest
import torch

from kd.core.errors import ModelError
from kd.core.types import Dims, Outputs
from kd.parts.losses import cosine


def build(student_features, teacher_features):
    torch.manual_seed(0)
    return cosine.build(cosine.Options(), Dims(0, student_features, teacher_features))


def test_equals_the_formula(agree, outputs):
    loss = build(*(output.features["pooled"].shape[1] for output in outputs[:2]))
    weight, bias = (parameter.detach().double() for parameter in loss.parameters())

    def formula(student, teacher, batch):
        projected_BD = student.features["pooled"] @ weight.T + bias
        target_BD = teacher.features["pooled"]
        lengths_B = (projected_BD**2).sum(dim=1).sqrt() * (target_BD**2).sum(
            dim=1
        ).sqrt()
        return 1 - (projected_BD * target_BD).sum(dim=1) / lengths_B

    agree(loss, formula)


def test_the_length_of_the_teachers_vectors_does_not_count(outputs):
    student, teacher, batch = outputs
    loss = build(
        student.features["pooled"].shape[1], teacher.features["pooled"].shape[1]
    )
    longer = Outputs(teacher.logits, {"pooled": 50 * teacher.features["pooled"]})
    torch.testing.assert_close(
        loss(student, longer, batch),
        loss(student, teacher, batch),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("widths", "model"), [((0, 8), "student"), ((8, 0), "teacher")]
)
def test_refuses_a_model_without_features(widths, model):
    with pytest.raises(
        ModelError, match=rf"^losses\.cosine: the {model} has no features"
    ):
        build(*widths)
