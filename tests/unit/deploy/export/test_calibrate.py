"""One temperature: it is the one of the lowest likelihood, and dividing by it changes
the logits and nothing else.
"""

import copy

import numpy as np
import pytest
import timm
import torch
from torch import nn

from kd.deploy.export.calibrate import (
    calibrate,
    cross_fitted,
    divide_logits,
    likelihood_gain,
)
from kd.models.classifier import Classifier, Network
from kd.parts.tasks.single_label import HIGHEST, LOWEST, calibration_error, temperature


def drawn(images=20_000, classes=7, scale=1.0):
    """Return logits, times `scale`, and labels that are drawn from the softmax of the
    unscaled ones.
    """
    generator = torch.Generator().manual_seed(0)
    logits_NC = 2 * torch.randn(images, classes, generator=generator)
    label_N = torch.multinomial(logits_NC.softmax(1), 1, generator=generator)[:, 0]
    return scale * logits_NC, label_N


@pytest.mark.parametrize("scale", [0.2, 1.0, 4.0])
def test_the_scale_of_the_logits_is_found(scale):
    assert temperature(*drawn(scale=scale)) == pytest.approx(scale, rel=0.03)


@pytest.mark.parametrize("scale", [0.2, 4.0])
def test_no_other_temperature_is_likelier(scale):
    logits_NC, label_N = drawn(500, scale=scale)
    fitted = temperature(logits_NC, label_N)

    def nll(at: float) -> float:
        return nn.functional.cross_entropy(logits_NC.double() / at, label_N).item()

    assert all(
        nll(fitted) < nll(fitted * factor)
        for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0)
    )


def test_each_half_is_divided_by_the_temperature_of_the_other():
    logits_NC, label_N = drawn(501, scale=4.0)
    divided = logits_NC / cross_fitted(logits_NC, label_N)
    for first in (0, 1):
        fitted = temperature(logits_NC[1 - first :: 2], label_N[1 - first :: 2])
        torch.testing.assert_close(
            divided[first::2], torch.full_like(divided[first::2], fitted)
        )


def test_all_right_or_all_wrong_predictions_give_a_limit():
    logits_NC = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
    assert temperature(logits_NC, torch.tensor([0, 1])) == pytest.approx(LOWEST)
    assert temperature(logits_NC, torch.tensor([1, 0])) == pytest.approx(HIGHEST)


NETWORKS = [
    *(
        "vit_tiny_patch16_224",
        "deit_tiny_distilled_patch16_224",
        "xcit_nano_12_p16_224",
    ),
    *("resnet18", "convnext_atto", "mobilenetv3_small_050"),
]


@pytest.mark.parametrize("name", NETWORKS)
def test_logits_are_divided(name):
    network = timm.create_model(name, num_classes=5).eval()
    image = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        before_BC = network(image)
        features = network.forward_features(image)
        assert divide_logits(network, 4.0)
        torch.testing.assert_close(network(image), before_BC / 4)
        torch.testing.assert_close(
            network.forward_features(image), features, rtol=0, atol=0
        )


class Cosine(nn.Linear):
    """A head that divides by the length of its weights."""


def test_a_nonlinear_last_layer_is_not_calibrated():
    network = timm.create_model("vit_tiny_patch16_224", num_classes=5, depth=1)
    network.head = Cosine(network.head.in_features, 5)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    assert not divide_logits(network, 4.0)
    assert not divide_logits(nn.Linear(2, 2), 4.0)
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in network.state_dict().items()
    )


class Own(nn.Module):
    """A network that no `get_classifier` describes; `before`: its last linear layer is
    not its last.
    """

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.before = before
        self.first = nn.Linear(48, 3)
        self.second = nn.Linear(3, 3)
        nn.init.normal_(self.first.weight)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.first(pixels.flatten(1))
        return (
            hidden + self.second(hidden).tanh()
            if self.before
            else self.second(hidden.tanh())
        )


def test_few_images_are_not_calibrated_on():
    student = Classifier(Network(Own(False)), 3, 4)
    values, line = calibrate(
        student, [(np.zeros((13, 3, 4, 4), np.uint8), np.zeros(13, np.int64))]
    )
    assert not values
    assert line.startswith("not calibrated: 13 validation images have a label")


@pytest.mark.parametrize("before", [False, True])
def test_a_network_of_ones_own_is_calibrated_where_its_logits_show_it(before):
    torch.manual_seed(0)
    network = Own(before)
    student = Classifier(Network(network), 3, 4)
    pixels = torch.randint(0, 256, (300, 3, 4, 4), dtype=torch.uint8)
    with torch.no_grad():
        logits_NC = student.answer(pixels)
        initial = {
            name: tensor.clone() for name, tensor in network.state_dict().items()
        }
        label_N = torch.multinomial(
            (logits_NC / (8.0 if before else 0.1)).softmax(1), 1
        )[:, 0]
        values, line = calibrate(student, [(pixels.numpy(), label_N.numpy())])
        after_NC = student.answer(pixels)
    if before:
        assert not values
        assert "Own" in line
        assert all(
            torch.equal(tensor, initial[name])
            for name, tensor in network.state_dict().items()
        )
    else:
        torch.testing.assert_close(after_NC, logits_NC / values["temperature"])
        assert values["calibrated_ece"] < values["ece"]


def test_a_temperature_is_taken_only_where_its_gain_is_sure():
    """Issue 49: of logits that are right already, the gate before (a smaller
    calibration error) let chance through.
    """
    torch.manual_seed(0)
    student = Classifier(Network(Own(False)), 3, 4)
    pixels = torch.randint(0, 256, (100, 3, 4, 4), dtype=torch.uint8)
    with torch.no_grad():
        logits_NC = student.answer(pixels)
        accepted = {1.0: 0, 0.2: 0}
        by_error = 0
        # 1: the labels are as the logits say, and what is fitted is chance
        for scale in accepted:
            for seed in range(40):
                generator = torch.Generator().manual_seed(seed)
                label_N = torch.multinomial(
                    (logits_NC / scale).softmax(1), 1, generator=generator
                )[:, 0]
                values, line = calibrate(
                    copy.deepcopy(student), [(pixels.numpy(), label_N.numpy())]
                )
                accepted[scale] += bool(values)
                divided_NC = cross_fitted(logits_NC, label_N)
                assert (
                    bool(values)
                    == (likelihood_gain(logits_NC, divided_NC, label_N)[0] > 0)
                    != ("not calibrated" in line)
                )
                by_error += scale == 1 and calibration_error(
                    divided_NC, label_N
                ) < calibration_error(logits_NC, label_N)
    assert accepted[1.0] <= 2 < 8 < by_error
    assert accepted[0.2] >= 30
