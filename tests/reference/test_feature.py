from __future__ import annotations

import pytest
import torch

from kd.errors import ModelError
from kd.losses import feature
from kd.types import Dims, Outputs


def build(student_features, teacher_features, **options):
    torch.manual_seed(0)
    return feature.build(feature.Options(**options), Dims(0, student_features, teacher_features))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("distance", ["mse", "cosine"])
def test_equals_the_formula(agree, outputs, distance, normalize):
    student, teacher, _ = outputs
    widths = (outputs.features["pooled"].shape[1] for outputs in (student, teacher))
    loss = build(*widths, distance=distance, normalize=normalize)
    weight, bias = (parameter.detach().double() for parameter in loss.parameters())

    def formula(student, teacher, batch):
        target_BD = teacher.features["pooled"]
        if normalize:
            centred_BD = target_BD - target_BD.mean(dim=1, keepdim=True)
            # 1e-5 is what LayerNorm adds to the variance.
            target_BD = centred_BD / ((centred_BD**2).mean(dim=1, keepdim=True) + 1e-5).sqrt()
        projected_BD = student.features["pooled"] @ weight.T + bias
        if distance == "mse":
            return ((projected_BD - target_BD) ** 2).mean(dim=1)
        lengths_B = (projected_BD**2).sum(dim=1).sqrt() * (target_BD**2).sum(dim=1).sqrt()
        return 1 - (projected_BD * target_BD).sum(dim=1) / lengths_B

    agree(loss, formula)


@pytest.mark.parametrize("distance", ["mse", "cosine"])
def test_is_zero_when_the_projection_equals_the_teacher(outputs, distance):
    _, teacher, batch = outputs
    width = teacher.features["pooled"].shape[1]
    loss = build(width, width, distance=distance, normalize=False)
    with torch.no_grad():
        loss.project.weight.copy_(torch.eye(width))
        loss.project.bias.zero_()
    loss_B = loss(Outputs(teacher.logits, teacher.features), teacher, batch)
    torch.testing.assert_close(loss_B, torch.zeros_like(loss_B), rtol=0, atol=1e-6)


def test_normalize_makes_scale_and_offset_of_the_teacher_irrelevant(outputs):
    student, teacher, batch = outputs
    loss = build(student.features["pooled"].shape[1], teacher.features["pooled"].shape[1], normalize=True)
    scaled = Outputs(teacher.logits, {"pooled": 50 * teacher.features["pooled"] + 3})
    torch.testing.assert_close(loss(student, scaled, batch), loss(student, teacher, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("widths", "model"), [((0, 8), "student"), ((8, 0), "teacher")])
def test_refuses_a_model_without_features(widths, model):
    with pytest.raises(ModelError, match=f"the {model} has no features"):
        build(*widths)


def test_rejects_an_unknown_distance():
    with pytest.raises(ValueError, match="distance must be one of mse, cosine, is 'l1'"):
        feature.Options(distance="l1")
