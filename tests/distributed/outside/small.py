"""A network that compiles in seconds, as one's own student."""

from torch import nn


def build(width: int, classes: int = 3) -> nn.Module:
    """Return a convolution and a classifier."""
    return nn.Sequential(nn.Conv2d(3, width, 8, 8), nn.GELU(), nn.Flatten(), nn.Linear(4 * width, classes))
