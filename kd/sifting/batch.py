"""Batches that can be sifted and accumulated wait in a queue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kd.sifting.config import UnsupportedDataFormatException

if TYPE_CHECKING:
    from typing_extensions import Self


class SiftingBatch(ABC):
    """Derive from this class for a batch that can be sifted and accumulated.

    `ListBatch` and `TensorBatch` suit most needs.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def take(self, index: Tensor) -> Self:
        """Return some samples as a batch of the same class.

        Args:
            index: positions of the samples, int64 [K].
        """

    @abstractmethod
    def join(self, others: Sequence[Self]) -> Self:
        """Return the samples of this batch and then those of the others.

        Args:
            others: batches of the same class.
        """


class SiftingBatchTransform(ABC):
    """Convert a user's batch to a `SiftingBatch` and back.

    It is needed only for formats not supported by default.
    """

    @abstractmethod
    def transform(self, batch: Any) -> SiftingBatch:
        """Return a batch in a form that can be sifted.

        Args:
            batch: a batch of the original loader.
        """

    @abstractmethod
    def reverse_transform(self, batch: Any) -> Any:
        """Return a batch as the training loop expects it.

        Args:
            batch: a sifted batch, of the class that `transform` returns.
        """


class _Labelled(SiftingBatch):
    """Inputs and labels have one entry per sample.

    Each is a tensor, an array or a list.

    Args:
        inputs: one entry per sample.
        labels: one entry per sample; None: there are none.

    Raises:
        UnsupportedDataFormatException: they differ in length.
    """

    def __init__(self, inputs: Any, labels: Any = None) -> None:
        self.inputs = inputs
        self.labels = labels
        if labels is not None and len(labels) != len(inputs):
            wrong = f"has {len(inputs)} inputs and {len(labels)} labels"
            raise UnsupportedDataFormatException(
                type(self).__name__, wrong, "Each sample has one of each"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def __iter__(self) -> Iterator[Any]:
        """Yield the inputs, then the labels if any.

        A loop may write `[t.to(device) for t in transformed_batch]`.
        """
        yield self.inputs
        if self.labels is not None:
            yield self.labels

    def take(self, index: Tensor) -> Self:
        return type(self)(*(take_rows(rows, index) for rows in self))

    def join(self, others: Sequence[Self]) -> Self:
        columns = zip(self, *others, strict=True)
        name = type(self).__name__
        return type(self)(*(join_rows(list(column), name) for column in columns))


class ListBatch(_Labelled):
    """This batch has a list of inputs and, optionally, a list of labels."""


class TensorBatch(_Labelled):
    """This batch has a tensor of inputs [B, ...] and, optionally, of labels."""


class Pending:
    """Selected samples wait in this queue, first in, first out.

    Batches of one size are taken from it.
    """

    def __init__(self) -> None:
        self.batches: list[SiftingBatch] = []

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    def add(self, batch: SiftingBatch) -> None:
        if len(batch):
            self.batches.append(batch)

    def put_back(self, batch: SiftingBatch) -> None:
        """Insert samples at the front, in their order."""
        self.batches.insert(0, batch)

    def join_all(self) -> SiftingBatch | None:
        """Return all samples as one batch, or None if the queue is empty.

        The samples stay in the queue.
        """
        if len(self.batches) > 1:
            self.batches = [self.batches[0].join(self.batches[1:])]
        return self.batches[0] if self.batches else None

    def pop(self, size: int) -> SiftingBatch:
        """Remove and return the first `size` samples."""
        batch = self.join_all()
        assert batch is not None
        if len(batch) == size:
            self.batches = []
            return batch
        order = torch.arange(len(batch))
        self.batches = [batch.take(order[size:])]
        return batch.take(order[:size])


def take_rows(rows: Any, index: Tensor) -> Any:
    """Return the rows of a tensor, an array, a list or a tuple at `index`."""
    if isinstance(rows, Tensor):
        return rows.index_select(0, index.to(rows.device))
    if isinstance(rows, np.ndarray):
        return rows[index.cpu().numpy()]
    return same_sequence(rows, [rows[i] for i in index.tolist()])


def join_rows(columns: list[Any], config_path: str) -> Any:
    """Concatenate the rows of columns.

    UnsupportedDataFormatException: tensors have different shapes.
    """
    first = columns[0]
    if len(columns) == 1:
        return first
    if not isinstance(first, (Tensor, np.ndarray)):
        return same_sequence(first, [row for column in columns for row in column])
    shapes = {tuple(column.shape[1:]) for column in columns}
    if len(shapes) > 1:
        wrong = (
            f"samples have the shapes {', '.join(map(str, sorted(shapes)))}, which do"
            " not fit into one batch"
        )
        remedy = (
            "Pad all batches to one length, or stack them in your own"
            " SiftingBatchTransform (batch_transforms)"
        )
        raise UnsupportedDataFormatException(
            config_path, wrong, "All samples must have one shape", remedy
        )
    return torch.cat(columns) if isinstance(first, Tensor) else np.concatenate(columns)


def same_sequence(sequence: Any, items: list[Any]) -> Any:
    """Return `items` as a sequence of the same class: list, tuple, namedtuple."""
    if isinstance(sequence, tuple):
        return type(sequence)(*items) if hasattr(sequence, "_fields") else tuple(items)
    return items
