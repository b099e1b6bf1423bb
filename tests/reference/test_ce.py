from dataclasses import replace

import pytest
import torch
from torch import nn

from kd.core.errors import ConfigError
from kd.core.types import Batch, Dims, Outputs
from kd.parts.losses import ce

DIMS = Dims(0, 0, 0)


def one_hot(label_B, num_classes):
    return (torch.arange(num_classes) == label_B[:, None]).double()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_equals_cross_entropy_with_a_mixed_and_smoothed_target(agree, smoothing):
    def formula(student, teacher, batch):
        C = student.logits.shape[1]
        lam_B1 = batch.lam.double()[:, None]
        target_BC = lam_B1 * one_hot(batch.label, C) + (1 - lam_B1) * one_hot(
            batch.partner_label, C
        )
        target_BC = (1 - smoothing) * target_BC + smoothing / C
        q_BC = student.logits.exp() / student.logits.exp().sum(dim=1, keepdim=True)
        return -(target_BC * q_BC.log()).sum(dim=1)

    agree(ce.build(ce.Options(label_smoothing=smoothing), DIMS), formula)


NAMES = ("apple", "fig", "lime", "pear")
WEIGHTS = {
    "list": ([0.5, 2, 1, 3], [0.5, 2.0, 1.0, 3.0]),
    "by name": ({"fig": 2.0, "pear": 0}, [1.0, 2.0, 1.0, 0.0]),
    "small": (
        [1e-4, 2e-4, 1e-4, 3e-4],
        [1.0, 2.0, 1.0, 3.0],
    ),  # their sum over the images is below 1
    "balanced": (
        "balanced",
        [1 / 20, 1 / 7, 1 / 3, 1 / 2],
    ),  # as scikit-learn's "balanced", up to a factor
}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("case", WEIGHTS)
def test_class_weights_are_torchs_over_all_training_images(case, smoothing):
    class_weights, raw = WEIGHTS[case]
    label_N = torch.repeat_interleave(torch.arange(4), torch.tensor([20, 7, 3, 2]))
    logits_NC = 3 * torch.randn(
        32, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    options = ce.Options(label_smoothing=smoothing, class_weights=class_weights)
    term = ce.build(options, Dims(4, 0, 0, classes=NAMES, labels=lambda: label_N))
    loss_N = term(
        Outputs(logits_NC.float()),
        Outputs(torch.zeros(32, 0)),
        Batch.of(torch.zeros(32, 1), label_N),
    )
    weight = torch.tensor(raw, dtype=torch.float64)
    torchs = nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing)
    torch.testing.assert_close(
        loss_N.double().mean(), torchs(logits_NC, label_N), rtol=1e-5, atol=1e-6
    )
    each = nn.CrossEntropyLoss(
        weight=weight, label_smoothing=smoothing, reduction="none"
    )
    factor = weight[label_N].mean()
    torch.testing.assert_close(
        loss_N.double(), each(logits_NC, label_N) / factor, rtol=1e-5, atol=1e-6
    )
    assert not term.state_dict()  # nothing that a checkpoint holds


def test_class_weights_of_mixed_images_are_torchs_of_soft_targets():
    label_B, partner_B = torch.randint(
        4, (2, 8), generator=torch.Generator().manual_seed(0)
    )
    lam_B = torch.linspace(0, 1, 8)
    batch = replace(
        Batch.of(torch.zeros(8, 1), label_B), partner_label=partner_B, lam=lam_B
    )
    student = Outputs(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)))
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0])
    term = ce.build(
        ce.Options(class_weights=weights.tolist()),
        Dims(4, 0, 0, labels=lambda: torch.arange(4)),
    )
    lam_B1 = batch.lam[:, None]
    target_BC = lam_B1 * one_hot(batch.label, 4) + (1 - lam_B1) * one_hot(
        batch.partner_label, 4
    )
    expected_B = nn.CrossEntropyLoss(weights / weights.mean(), reduction="none")(
        student.logits, target_BC.float()
    )
    torch.testing.assert_close(
        term(student, student, batch), expected_B, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "wrong", ["even", [], {}, [1, -1], [1, True], {"fig": float("nan")}, 3]
)
def test_invalid_class_weights_are_refused(wrong):
    with pytest.raises(ValueError, match="class_weights must be"):
        ce.Options(class_weights=wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"figg": 2}, "'figg', which is no class.*'fig'"),
        ([1, 2], "2 numbers, .* 4 classes"),
        ([0] * 4, "every training"),
    ],
)
def test_weights_of_other_classes_are_refused(wrong, words):
    with pytest.raises(ConfigError, match=rf"^losses\[\]\.class_weights: .*{words}"):
        ce.build(
            ce.Options(class_weights=wrong),
            Dims(4, 0, 0, classes=NAMES, labels=lambda: torch.arange(4)),
        )


def test_balanced_weights_have_the_mean_1_over_the_images_with_a_label():
    """scikit-learn's formula N / (C n_c): 8 / (2 x 6) and 8 / (2 x 2); 8 further images
    have no label.
    """
    label_N = torch.tensor([0] * 6 + [1] * 2 + [-1] * 8)
    weights = ce.class_weights(
        "balanced", Dims(2, 0, 0, classes=("a", "b"), labels=lambda: label_N)
    )
    assert torch.allclose(weights, torch.tensor([2 / 3, 2.0]))
