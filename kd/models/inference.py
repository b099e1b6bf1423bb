"""Predict batches of images with a model; the outputs are on the CPU."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kd.core.types import Batch, Outputs


class Predicted(NamedTuple):
    """Hold a model's predictions for a batch, on the CPU."""

    ids: Tensor  # int64 [B]
    labels: Tensor  # int64 [B], or int8 [B, C]; -1 unknown
    outputs: Outputs


def predict(
    model: Callable[[Batch], Outputs], batches: Iterable[Batch], device: torch.device
) -> Iterator[Predicted]:
    """Yield ids, labels and a model's outputs.

    They are computed on `device` without gradients.
    """
    # For a module of pixels pass `lambda batch: module(batch.image)`.
    for batch in batches:
        with torch.no_grad():
            outputs = model(batch.to(device))
        yield Predicted(
            batch.ids.cpu(), batch.label.cpu(), outputs.map(lambda tensor: tensor.cpu())
        )
