"""Ask a model about the images of a split, in this process: their batches, and its answers to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kd.core.contracts import Dataset
from kd.core.types import Batch, Outputs

BATCH = 50
"""Images of a forward. On a CPU an image costs the same from about 16 a batch on; 50 of 224 pixels take 30 MB."""


class Answered(NamedTuple):
    """What a model answers to a batch; all on the CPU."""

    ids: Tensor
    """int64 [B]."""
    labels: Tensor
    """int64 [B], or int8 [B, C]; -1 where nobody knows."""
    outputs: Outputs


def batches_of(dataset: Dataset, ids: Sequence[int], size: int = BATCH) -> Iterator[Batch]:
    """Yield the images `ids` in batches of up to `size`, on the CPU; those that cannot be decoded are left out."""
    for first in range(0, len(ids), size):
        samples = [(id, dataset.load(id, 0)) for id in ids[first : first + size]]
        samples = [(id, sample) for id, sample in samples if sample.readable]
        if samples:
            labels = torch.from_numpy(np.array([sample.label for _, sample in samples]))
            pixels = torch.stack([sample.pixels for _, sample in samples])
            yield Batch.of(pixels, labels, torch.tensor([id for id, _ in samples]))


def ask(model: Callable[[Batch], Outputs], batches: Iterable[Batch], device: torch.device) -> Iterator[Answered]:
    """Yield ids, labels and the outputs of a model on `device`, without gradients.

    A module that takes pixels is asked by `lambda batch: module(batch.image)`.
    """
    for batch in batches:
        with torch.no_grad():
            outputs = model(batch.to(device))
        yield Answered(batch.ids.cpu(), batch.label.cpu(), outputs.map(lambda tensor: tensor.cpu()))
