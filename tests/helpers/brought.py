"""Networks as people bring them: some with a fault that no shape shows, some that are
only unusual.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDE = 16
CLASSES = 3


class Patches(nn.Module):
    """Patch embeddings [B, 16, D], a layer on them, the mean, a classifier."""

    def __init__(
        self, layer: nn.Module, width: int = 16, zero_head: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.layer = layer
        self.head = nn.Linear(width, CLASSES)
        if zero_head:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(
            self.layer(self.embed(image).flatten(2).transpose(1, 2)).mean(1)
        )


def attention(batch_first: bool, zero_head: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=batch_first)
    return Patches(layer, zero_head=zero_head)


class Scaled(nn.Module):
    """A residual layer whose scale begins at 1e-5, as in CaiT."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.full((16,), 1e-5))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.scale * self.inner(tokens)


class Recurrent(nn.Module):
    """An LSTM over the rows of an image, or (a fault) over the images."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.rows = nn.LSTM(3 * SIDE, 16, batch_first=batch_first)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.rows(image.transpose(1, 2).flatten(2))[0][:, -1])


class Changed(nn.Module):
    """A plain network with something done to its pixels or its logits."""

    def __init__(self, before=lambda image: image, after=lambda logits: logits) -> None:
        super().__init__()
        self.before = before
        self.after = after
        self.plain = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, CLASSES))

    def forward(self, image: Tensor) -> Tensor:
        return self.after(self.plain(self.before(image)))


def convolution(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2),
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 48)
        self.second = nn.Linear(48, 48)
        self.second.weight = self.first.weight
        self.head = nn.Linear(48, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(image, 4).flatten(1)
        return self.head(self.second(self.first(pooled).relu()))


class Unused(nn.Module):
    """A network with a layer that its forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, CLASSES))
        self.pooler = nn.Linear(4, 4)

    def forward(self, image: Tensor) -> Tensor:
        return self.plain(image)


class Centred(nn.Module):
    """Subtracts a mean that it goes on learning in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, CLASSES))
        self.register_buffer("centre", torch.zeros(CLASSES))

    def forward(self, image: Tensor) -> Tensor:
        logits = self.plain(image)
        self.centre += 0.1 * logits.detach().mean(0)
        return logits - self.centre


class Expert(nn.Module):
    """A layer for at most three quarters of a batch, like an expert with a capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = Changed()
        self.expert = nn.Linear(CLASSES, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        logits = self.plain(image)
        is_routed = torch.arange(len(image)) < math.ceil(0.75 * len(image))
        return logits + self.expert(logits) * is_routed[:, None]


class Listed(nn.Module):
    """A network whose layers are in a list of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = Changed()
        self.layers = [nn.Linear(CLASSES, CLASSES) for _ in range(2)]

    def forward(self, image: Tensor) -> Tensor:
        logits = self.plain(image)
        for layer in self.layers:
            logits = layer(logits)
        return logits


class InTraining(nn.Module):
    """Does something to its logits in training alone."""

    def __init__(self, after) -> None:
        super().__init__()
        self.plain = Changed()
        self.after = after

    def forward(self, image: Tensor) -> Tensor:
        logits = self.plain(image)
        return self.after(logits) if self.training else logits


def with_nan() -> nn.Module:
    network = Changed()
    network.plain[1].weight.data[0, 0] = float("nan")
    return network


def normalized_in_place(image: Tensor) -> Tensor:
    return image.sub_(0.5).div_(0.25)


FAULTS = {
    "attention over the batch": (lambda: attention(False), "alone has other outputs"),
    "the same behind a classifier of zeros": (
        lambda: attention(False, True),
        "alone has other outputs",
    ),
    "the same behind a small LayerScale": (
        lambda: Patches(
            Scaled(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=False))
        ),
        "alone has other outputs",
    ),
    "an LSTM over the batch": (lambda: Recurrent(False), "place in the batch"),
    "batch norm with the batch's statistics": (
        lambda: convolution(nn.BatchNorm2d(8, track_running_stats=False)),
        "alone has other outputs",
    ),
    "centred over the batch": (
        lambda: Changed(after=lambda x: x - x.mean(0)),
        "alone has other outputs",
    ),
    "a number of the row": (
        lambda: Changed(after=lambda x: x + torch.arange(len(x))[:, None]),
        "place in the batch",
    ),
    "squeeze": (lambda: Changed(after=torch.squeeze), "shape"),
    "flattened": (lambda: Changed(after=lambda x: x.flatten()), "shape"),
    "dropout that always acts": (
        lambda: Changed(after=lambda x: F.dropout(x, 0.5, True)),
        "same pixels",
    ),
    "noise on its pixels": (
        lambda: Changed(before=lambda x: x + torch.randn_like(x)),
        "same pixels",
    ),
    "a centre learned in evaluation": (Centred, "same images again.*centre"),
    "an expert with a capacity": (Expert, "in a batch of 5 has other outputs"),
    "softmax over the batch": (
        lambda: Changed(after=lambda x: x.softmax(0).log()),
        "alone has other outputs",
    ),
    "layers in a list": (Listed, "does not list"),
    "a lazy layer": (
        lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES)),
        "lazy",
    ),
    "NaN in its weights": (with_nan, "NaN or infinity"),
    "sigmoid": (lambda: Changed(after=torch.sigmoid), "probabilities"),
    "softmax": (lambda: Changed(after=lambda x: x.softmax(1)), "probabilities"),
}
"""Networks that no door may accept, and a word of the message, by name."""

STUDENTS = {
    "softmax in training": (
        lambda: InTraining(lambda x: x.softmax(1)),
        "probabilities in training",
    )
}
"""Faults that final weights do not show."""

HONEST = {
    "linear": lambda: Changed(),
    "attention": lambda: attention(True),
    "attention behind a classifier of zeros": lambda: attention(True, True),
    "a small LayerScale": lambda: Patches(
        Scaled(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True))
    ),
    "an LSTM over rows": lambda: Recurrent(True),
    "batch norm": lambda: convolution(nn.BatchNorm2d(8)),
    "group norm": lambda: convolution(nn.GroupNorm(2, 8)),
    "instance norm": lambda: convolution(nn.InstanceNorm2d(8)),
    "dropout": lambda: convolution(nn.Dropout(0.5)),
    "tied weights": Tied,
    "spectral norm": lambda: nn.Sequential(
        nn.Flatten(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3 * SIDE**2, CLASSES)),
    ),
    "an unused layer": Unused,
    "in place": lambda: Changed(before=normalized_in_place),
    "something in training": lambda: InTraining(lambda x: x + 1),
    "a tuple": lambda: Changed(after=lambda x: (x, x.mean())),
}
"""Networks that every door accepts, by name."""
