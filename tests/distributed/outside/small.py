"""A network that compiles in seconds, as one's own student."""

from torch import Tensor, nn


def build(width: int, classes: int = 3) -> nn.Module:
    """Return a convolution and a classifier."""
    return nn.Sequential(
        nn.Conv2d(3, width, 8, 8),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


class Partly(nn.Module):
    """A classifier with a layer that its forward never calls, and one that it calls up
    to a step.
    """

    def __init__(self, sometimes: bool) -> None:
        super().__init__()
        self.used = build(4)
        self.extra = nn.Linear(3, 3)
        self.pooler = nn.Identity() if sometimes else nn.Linear(4, 4)
        self.calls = 0
        self.sometimes = sometimes

    def forward(self, image: Tensor) -> Tensor:
        logits = self.used(image)
        self.calls += self.training
        return (
            logits if self.sometimes and self.calls > 6 else logits + self.extra(logits)
        )


def partly(sometimes: bool = False) -> nn.Module:
    """Return a `Partly`."""
    return Partly(sometimes)
