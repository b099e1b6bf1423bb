"""Calibrate a classifier's confidences by one temperature for its logits.

Temperature scaling (Guo et al. 2017, arXiv:1706.04599, section 4.2):
`kd.parts.tasks.single_label.temperature` finds T > 0 on validation images, and the
weights of the last, linear layer are divided by T. Predictions do not change. T is used
only if its gain, measured on images that did not choose it, has a 95 % interval above
0: for an already calibrated student T is noise.
"""

from typing import Any

import numpy as np
import torch
from timm.layers import Linear
from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.intervals import bootstrap_interval, bootstrap_scores
from kd.core.text import percent
from kd.deploy.export.parity import Batches, eager_runner
from kd.models.classifier import Classifier, Network
from kd.parts.tasks.single_label import calibration_error, temperature

LINEAR = (nn.Linear, Linear)
# fewest labelled images: with fewer, the interval is wider than any realistic gain
FEWEST_LABELLED = 100


def calibrate(student: Classifier, images: Batches) -> tuple[dict[str, Any], str]:
    """Divide the student's last layer by a temperature fitted on validation images.

    Return the result as JSON values and one line of text; {} and the reason if nothing
    was changed.
    """
    predict = eager_runner(student)
    batches: list[tuple[np.ndarray, np.ndarray]] = []
    pixels = np.zeros(0)
    for pixels, labels, *_ in images:
        batches.append((predict(pixels), labels))
    logits_NC, label_N = (
        torch.from_numpy(np.concatenate(each)) for each in zip(*batches, strict=True)
    )
    labelled_N = label_N >= 0
    logits_NC = logits_NC[labelled_N]
    label_N = label_N[labelled_N]
    mistakes = int((logits_NC.argmax(1) != label_N).sum())
    if len(label_N) < FEWEST_LABELLED or not mistakes:
        return {}, (
            f"not calibrated: {len(label_N)} validation images have a label and"
            f" {mistakes} predictions are wrong; {FEWEST_LABELLED} images and one wrong"
            " prediction are needed"
        )
    low_gain, high_gain = likelihood_gain(
        logits_NC, cross_fitted(logits_NC, label_N), label_N
    )
    if low_gain <= 0:
        return {}, (
            "not calibrated: a temperature fitted on one half does not surely help the"
            f" other (log-likelihood gains {low_gain:.4f} to {high_gain:.4f} nats per"
            " image (95 %))"
        )
    calibration = fitted_temperature(logits_NC, label_N)
    if reason := _divide_and_check(
        student, calibration["temperature"], pixels, batches[-1][0]
    ):
        return {}, f"not calibrated: {reason}"
    errors = (
        f"{percent(calibration['ece'])} -> {percent(calibration['calibrated_ece'])}"
    )
    return calibration, (
        f"calibrated: logits divided by {calibration['temperature']:.3g}, fitted on"
        f" {len(label_N)} validation images; calibration error {errors}, fitted on one"
        " half and counted on the other"
    )


def fitted_temperature(logits_NC: Tensor, label_N: Tensor) -> dict[str, Any]:
    """Return the temperature of logits [N, C] with the calibration errors around it."""
    return {
        "temperature": temperature(logits_NC, label_N),
        "images": len(label_N),
        "ece": calibration_error(logits_NC, label_N),
        "calibrated_ece": calibration_error(cross_fitted(logits_NC, label_N), label_N),
    }


def cross_fitted(logits_NC: Tensor, label_N: Tensor) -> Tensor:
    """Return logits [N, C], each half divided by the temperature of the other half."""
    first_N = torch.arange(len(label_N)) % 2 == 0
    divided_NC = logits_NC.clone()
    for half_N in (first_N, ~first_N):
        divided_NC[~half_N] /= temperature(logits_NC[half_N], label_N[half_N])
    return divided_NC


def likelihood_gain(
    logits_NC: Tensor, divided_NC: Tensor, label_N: Tensor
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean gain in nats per image."""
    before_N, after_N = (
        F.cross_entropy(each.double(), label_N, reduction="none")
        for each in (logits_NC, divided_NC)
    )
    gain_N = (before_N - after_N).numpy()
    return bootstrap_interval(
        gain_N.mean(), bootstrap_scores(lambda picks: gain_N[picks].mean(), len(gain_N))
    )


def _divide_and_check(
    student: Classifier, divisor: float, pixels: np.ndarray, logits_BC: np.ndarray
) -> str:
    """Divide a student's logits, checked on `pixels`; return the failure, or ""."""
    network = student.network
    name = type(network.inner if isinstance(network, Network) else network).__name__
    original_weights = {
        key: tensor.clone() for key, tensor in network.state_dict().items()
    }
    if not divide_logits(network, divisor):
        return f"the last layer of {name} is not one nn.Linear"
    if not np.allclose(
        eager_runner(student)(pixels) * divisor, logits_BC, rtol=1e-3, atol=1e-3
    ):
        network.load_state_dict(original_weights)
        return f"the logits of {name} are not the output of its last linear layer"
    return ""


def divide_logits(network: nn.Module, divisor: float) -> bool:
    """Divide the weights of a network's last layer in place; return whether it has one.

    A timm network may have several linear layers whose outputs are added or averaged.
    In other networks it is the last registered linear layer; the caller must check that
    the logits are divided.
    """
    is_module = isinstance(network, Network)
    model: Any = network.inner if is_module else network
    heads: Any = []
    if hasattr(model, "get_classifier"):
        heads = model.get_classifier()
        if not isinstance(heads, tuple | list | nn.ModuleList):
            heads = [heads]
    elif is_module:
        heads = [layer for layer in model.modules() if type(layer) in LINEAR][-1:]
    if not heads or not all(type(head) in LINEAR for head in heads):
        return False
    with torch.no_grad():
        for parameter in {p for head in heads for p in head.parameters()}:
            parameter /= divisor
    return True
