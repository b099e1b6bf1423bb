"""Make the confidences of a classifier right on average: one temperature for its logits.

Temperature scaling of Guo et al. 2017, "On Calibration of Modern Neural Networks" (arXiv:1706.04599), section 4.2: the
T > 0 that `kd.parts.tasks.single_label.temperature` finds on images that were not trained on. The weights of the last
layer, which is linear, are divided by T. The class that is answered stays the same.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Linear
from torch import Tensor, nn

from kd.models.classifier import Network
from kd.parts.tasks.single_label import temperature

LINEAR = (nn.Linear, Linear)


def exchanged(logits_NC: Tensor, label_N: Tensor) -> Tensor:
    """Return logits [N, C], each divided by a temperature that was fitted on the half in which its image is not.

    So what is said of them holds for images that chose nothing. The halves are every second image.
    """
    first_N = torch.arange(len(label_N)) % 2 == 0
    divided_NC = logits_NC.clone()
    for half_N in (first_N, ~first_N):
        divided_NC[~half_N] /= temperature(logits_NC[half_N], label_N[half_N])
    return divided_NC


def divide_logits(network: nn.Module, by: float) -> bool:
    """Divide the weights of a network's last layer, in place, and return whether it has one.

    A timm network may have several, all linear, whose outputs are added or averaged. Of a network of one's own it is
    the linear layer that is registered last; the caller must check that the logits are divided. Else nothing changes.
    """
    own = isinstance(network, Network)
    model: Any = network.inner if own else network
    found: Any = None
    if hasattr(model, "get_classifier"):
        found = model.get_classifier()
    elif own:
        found = [one for one in model.modules() if type(one) in LINEAR][-1:]
    heads: list[Any] = list(found) if isinstance(found, tuple | list | nn.ModuleList) else [found]
    if not heads or not all(type(head) in LINEAR for head in heads):
        return False
    with torch.no_grad():
        for parameter in {p for head in heads for p in head.parameters()}:
            parameter /= by
    return True
