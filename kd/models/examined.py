"""A network under examination, and its outputs for two images in several batches.

Afterwards it is as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

IMAGES = 2
"""Images of an examination: one may change the other's outputs. The second is shown as
its negative, so that even two photographs of one scene differ much.
"""
SAME = (0, 1)  # a batch by the numbers of its images, as are those below
SWAPPED = (1, 0)  # both images in other places
ALONE = (0,)  # an image without the other
MIXED = (1, 0, 1, 0, 1)
"""Other places, and more than two images: an expert that takes three quarters of a
batch takes both of two.
"""
EXACT = 1e-4
"""Largest change of an output between batches, as a share of the largest |output|. 30
networks of timm and transformers in float32: at most 2.6e-6 (`examination_*.csv`).
Faults in small untrained networks: 0.0005 to 1; 0.0005 is the least of 1,000 draws of
attention over the batch behind a small LayerScale, of which 7 were below 0.001
(benchmarks/LOG.md).
"""
INEXACT = 0.2
"""The same for int8 whose scale is that of the batch (a dynamic int8 ViT-Tiny had
0.072) and for weights of 16 bits.
"""


@dataclass
class Examined:
    """Run a network in evaluation mode on two images."""

    model: Any  # returns `kd.core.types.Outputs`
    images: Tensor  # [2, ...]; on the meta device only shapes are known
    logits: bool = True  # whether its first output is for a softmax or sigmoid
    micro_batch: int = 0  # images of a micro-batch in training; 0: it is not trained
    _changes: dict[tuple[Sequence[int], int], float] = field(default_factory=dict)

    def outputs(self, rows: Sequence[int] = SAME, seed: int = 0) -> dict[str, Tensor]:
        """Return logits and features [B, ...] by name for a batch of these images.

        `seed` is that of its dropout.
        """
        torch.default_generator.manual_seed(seed)
        images = self.images[list(rows)]
        outputs = self.model(images)
        if not outputs.logits.numel() and not outputs.features:  # an embedding model
            return {"features": self.model.answer(images)}
        return {"logits": outputs.logits, **outputs.features}

    @cached_property
    def together(self) -> dict[str, Tensor]:
        return self.outputs()

    @cached_property
    def limit(self) -> float:
        """Return the largest change of an output that rounding explains."""
        if getattr(self.model, "runtime", "torch") != "torch":
            return INEXACT
        dtypes = {parameter.dtype for parameter in self.model.parameters()}
        quantized = any(
            ".quantized" in type(module).__module__ for module in self.model.modules()
        )
        if quantized or dtypes & {torch.float16, torch.bfloat16}:
            return INEXACT
        return EXACT

    def change(self, rows: Sequence[int], seed: int = 0) -> float:
        """Return the largest change of an output from `together`; 0 if unknown.

        It is a share of the largest |output|.
        """
        if (rows, seed) not in self._changes:
            changes = [0.0]
            for name, repeated in self.outputs(rows, seed).items():
                output = self.together[name]
                if output.numel() and not output.is_meta and output.isfinite().all():
                    largest = output.abs().max().clamp_min(1e-30)
                    share = (output[list(rows)] - repeated).abs().max() / largest
                    changes.append(share.float().nan_to_num(nan=float("inf")).item())
            self._changes[rows, seed] = max(changes)
        return self._changes[rows, seed]


def noise_images(size: int) -> Tensor:
    """Return random images, uint8 [2, 3, size, size], in place of the data's."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(
        256, (IMAGES, 3, size, size), generator=generator, dtype=torch.uint8
    )


@contextmanager
def restored(model: nn.Module, parameters: bool) -> Iterator[None]:
    """Give buffers and every module's mode their values again at the end.

    With `parameters` those too, bit by bit.
    """
    tensors = itertools.chain(model.parameters() if parameters else (), model.buffers())
    saved = [
        (tensor, tensor.detach().clone()) for tensor in tensors if not tensor.is_meta
    ]
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for tensor, before in saved:
                tensor.detach().copy_(before)
        for module, training in modes.items():
            module.training = training


@torch.no_grad()
def add_noise(
    model: nn.Module, deviation: float, seed: int, below: float = float("inf")
) -> None:
    """Add normal noise to parameters whose root mean square is less than `below`."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_meta or not parameter.is_floating_point():
            continue
        if parameter.numel() and parameter.float().square().mean().sqrt() < below:
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.add_(deviation * drawn.to(parameter.device, parameter.dtype))


@contextmanager
def full_precision() -> Iterator[None]:
    """Multiply float32 matrices on a GPU in float32, not in TF32.

    The rounding of TF32 depends on the shapes.
    """
    switches: Sequence[Any] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = False
        yield
    finally:
        for switch, allowed in zip(switches, before, strict=True):
            switch.allow_tf32 = allowed
