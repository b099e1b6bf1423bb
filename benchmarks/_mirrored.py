"""A teacher whose logits are the mean over a picture and its mirror image, as airbench
evaluates (arXiv:2404.00498).

In a configuration: `teacher: {kind: torch, model: "benchmarks._mirrored:network", mean:
[...], std: [...]}` with the `model.safetensors` of an exported teacher of timm as
`checkpoint`.
"""

from __future__ import annotations

import timm
from torch import Tensor, nn


class Mirrored(nn.Module):
    """Ask the network twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        """Return the mean of both answers [B, C]."""
        return (self.inner(pixels_BCHW) + self.inner(pixels_BCHW.flip(-1))) / 2


def network(model: str, classes: int) -> nn.Module:
    """Build timm's network around the weights that kd will load."""
    return Mirrored(timm.create_model(model, num_classes=classes))
