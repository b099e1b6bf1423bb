"""The values that travel between parts: frozen dataclasses, nothing else.

Shape legend: B images of a batch, C classes, D feature width, H W pixels, N images of a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Sample(NamedTuple):
    """One image as training sees it: the view of one id, mixed with a partner or not."""

    pixels: Tensor
    """uint8 [3, H, W], RGB."""
    label: int
    partner_label: int
    """The label of the image mixed in; equal to `label` where nothing was mixed."""
    lam: float
    """The share of `label` in the pixels, 0 to 1; 1.0 where nothing was mixed."""
    readable: bool = True
    """False where the image could not be decoded and `data.on_corrupt` is `skip`; the pixels are then grey."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch: always full, always of one shape, with the ids that lead back to the images."""

    ids: Tensor
    """int64 [B], positions in the dataset."""
    image: Tensor
    """uint8 [B, 3, H, W]; each model normalizes and resizes for itself."""
    label: Tensor
    """int64 [B]."""
    partner_label: Tensor
    """int64 [B]; equal to `label` where the image is not mixed."""
    lam: Tensor
    """float32 [B], the share of `label`, 1.0 where the image is not mixed."""
    weight: Tensor
    """float32 [B], from the sifter's plan; 0.0 marks padding."""
    view: int = 0
    """Which view of the images this is: `epoch mod views`, or the epoch itself."""
    unreadable: tuple[int, ...] = ()
    """Ids whose image could not be decoded; they carry weight 0."""

    @classmethod
    def of(cls, image: Tensor, label: Tensor, ids: Tensor | None = None) -> Batch:
        """Make a batch of unmixed images of weight 1, as a loop that knows only images and labels has them.

        Args:
            image: [B, ...], on the device already.
            label: int64 [B].
            ids: int64 [B]; 0 to B - 1 where nothing asks for them.
        """
        ones = torch.ones(len(label), device=label.device)
        numbers = torch.arange(len(label), device=label.device)
        return cls(numbers if ids is None else ids, image, label, label, ones, ones)

    def map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with `move` applied to each tensor."""
        names = ("ids", "image", "label", "partner_label", "lam", "weight")
        return replace(self, **{name: move(getattr(self, name)) for name in names})

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return the batch on `device`."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory; torch's DataLoader calls this by name."""
        return self.map(lambda tensor: tensor.pin_memory())


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a model says of a batch."""

    logits: Tensor
    """[B, C], raw, any float dtype."""
    features: Tensor | None = None
    """[B, D], pooled features before the classifier; None where no loss asked for them."""


@dataclass(frozen=True, slots=True)
class Dims:
    """The sizes a loss may need to build learned adapters."""

    num_classes: int
    student_features: int
    teacher_features: int
    """0 where the run has no teacher."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which images an epoch visits, in order, and with what weight. The same on every rank."""

    ids: Tensor
    """int64 [N]; N is a multiple of the global batch size."""
    weights: Tensor
    """float32 [N]; 1.0 where the image stands for itself only."""


@dataclass(frozen=True, slots=True)
class State:
    """How far a run has come. Everything random is a function of (seed, this)."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    step_in_epoch: int = 0
    """Steps done of the current epoch's plan."""
    images: int = 0
    """Images trained on, all ranks together."""
    seconds: float = 0.0
    """Time spent training so far, evaluation and checkpoints left out."""
    best: float = -1.0
    """The best validation accuracy so far, 0 to 1; -1 before the first evaluation."""
