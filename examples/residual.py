"""A small residual network for 32-pixel images, from one function: the teacher and the
student of configs/cifar10.yaml.

Eight convolutions at 32, 16, 8 and 4 pixels. `width` is the number of channels of the
first; the cost grows with its square. timm's networks halve an image two to five times
before their first block, which at 32 pixels is too much.
"""

import torch
from torch import Tensor, nn


class Residual(nn.Sequential):
    """Layers whose input is added to their output."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the same shape."""
        return input + super().forward(input)


def convolution(inputs: int, outputs: int, halve: bool = False) -> nn.Sequential:
    """Return a 3 x 3 convolution with batch norm, which may halve the image."""
    pool = [nn.MaxPool2d(2)] if halve else []
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        *pool,
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def network(width: int = 16, classes: int = 10, fold: int = 1) -> nn.Module:
    """Map normalized images [B, 3, H, W] to logits [B, classes].

    H and W are multiples of 8. `fold`: squares of so many pixels become channels first,
    so that an image of 128 px costs as much as one of 32.
    """
    folding = [nn.PixelUnshuffle(fold)] if fold > 1 else []
    layers = nn.Sequential(
        *folding,
        convolution(3 * fold**2, width),
        convolution(width, 2 * width, halve=True),
        Residual(convolution(2 * width, 2 * width), convolution(2 * width, 2 * width)),
        convolution(2 * width, 4 * width, halve=True),
        convolution(4 * width, 8 * width, halve=True),
        Residual(convolution(8 * width, 8 * width), convolution(8 * width, 8 * width)),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )
    return layers.to(memory_format=torch.channels_last)  # faster on a CPU
