"""Batches that can be sifted and accumulated, and the conversion of a user's batch."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kd.sifting.config import UnsupportedDataFormatException

if TYPE_CHECKING:
    from typing_extensions import Self


class SiftingBatch(ABC):
    """A batch that can be sifted and accumulated. `ListBatch` and `TensorBatch` suit most needs."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def take(self, index: Tensor) -> Self:
        """Return the samples at the positions `index`, int64 [K]."""

    @abstractmethod
    def join(self, others: Sequence[Self]) -> Self:
        """Return the samples of this batch and then those of the others."""


class SiftingBatchTransform(ABC):
    """Convert a user's batch to a `SiftingBatch` and back; needed only for formats not supported by default."""

    @abstractmethod
    def transform(self, batch: Any) -> SiftingBatch:
        """Return the batch in a form that can be sifted."""

    @abstractmethod
    def reverse_transform(self, batch: Any) -> Any:
        """Return a sifted batch in the form that the training loop expects."""


class _Labelled(SiftingBatch):
    """Inputs and labels, each a tensor, an array or a list with one entry per sample."""

    def __init__(self, inputs: Any, labels: Any = None) -> None:
        self.inputs, self.labels = inputs, labels
        if labels is not None and len(labels) != len(inputs):
            wrong = f"has {len(inputs)} inputs and {len(labels)} labels"
            raise UnsupportedDataFormatException(type(self).__name__, wrong, "Each sample has one of each")

    def __len__(self) -> int:
        return len(self.inputs)

    def __iter__(self) -> Iterator[Any]:
        """Yield the inputs, then the labels if any: `[t.to(device) for t in transformed_batch]`."""
        yield self.inputs
        if self.labels is not None:
            yield self.labels

    def take(self, index: Tensor) -> Self:
        return type(self)(*(take(part, index) for part in self))

    def join(self, others: Sequence[Self]) -> Self:
        return type(self)(*(join(list(parts), type(self).__name__) for parts in zip(self, *others, strict=True)))


class ListBatch(_Labelled):
    """A list of inputs and, optionally, a list of labels."""


class TensorBatch(_Labelled):
    """A tensor of inputs [B, ...] and, optionally, a tensor of labels [B, ...]."""


def take(rows: Any, index: Tensor) -> Any:
    """Return the rows at the positions `index` of a tensor, an array, a list or a tuple."""
    if isinstance(rows, Tensor):
        return rows.index_select(0, index.to(rows.device))
    if isinstance(rows, np.ndarray):
        return rows[index.cpu().numpy()]
    return like(rows, [rows[i] for i in index.tolist()])


def join(parts: list[Any], where: str) -> Any:
    """Concatenate the rows of all parts.

    Raises:
        UnsupportedDataFormatException: tensors of different shapes, for example padded to the longest of each batch.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if not isinstance(first, (Tensor, np.ndarray)):
        return like(first, [row for part in parts for row in part])
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        wrong = f"samples have the shapes {', '.join(map(str, sorted(shapes)))}, which do not fit into one batch"
        remedy = "Pad all batches to one length, or stack them in your own SiftingBatchTransform (batch_transforms)"
        raise UnsupportedDataFormatException(where, wrong, "All samples must have one shape", remedy)
    return torch.cat(parts) if isinstance(first, Tensor) else np.concatenate(parts)


def like(sequence: Any, items: list[Any]) -> Any:
    """Return `items` as a sequence of the same class: list, tuple, namedtuple."""
    if isinstance(sequence, tuple):
        return type(sequence)(*items) if hasattr(sequence, "_fields") else tuple(items)
    return items


def to_device(value: Any, device: torch.device) -> Any:
    """Return a nested batch with all its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return _with_values(value, {key: to_device(item, device) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return like(value, [to_device(item, device) for item in value])
    return value


def _with_values(mapping: Any, values: dict[Any, Any]) -> Any:
    result = copy.copy(mapping)  # keeps the class: a BatchEncoding, an OrderedDict
    for key, value in values.items():
        result[key] = value
    return result


ROWS, SAME = "one entry a sample", "one value for all samples"
"""The two kinds of leaves of a batch; `state_dict` saves these strings."""


class TreeBatch(SiftingBatch):
    """A nested batch of dicts, lists and tuples with rows at its leaves."""

    def __init__(self, data: Any, form: Any, size: int) -> None:
        self.data, self.form, self.size = data, form, size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def take(self, index: Tensor) -> TreeBatch:
        data = _walk([self.data], self.form, lambda parts, _: take(parts[0], index), lambda parts, _: parts[0])
        return TreeBatch(data, self.form, len(index))

    def join(self, others: Sequence[TreeBatch]) -> TreeBatch:
        batches = [self, *others]
        data = _walk([batch.data for batch in batches], self.form, join, _one)
        return TreeBatch(data, self.form, sum(map(len, batches)))


def _walk(trees: list[Any], form: Any, rows: Callable[[list[Any], str], Any], same: Any, where: str = "batch") -> Any:
    """Apply `rows` or `same` to the corresponding leaves of trees of one structure."""
    if isinstance(form, str):
        return (rows if form == ROWS else same)(trees, where)
    first = trees[0]
    if isinstance(form, Mapping):
        try:
            branches = {key: [tree[key] for tree in trees] for key in form}
        except (KeyError, TypeError, IndexError):
            raise _changed(where) from None
        values = {key: _walk(branches[key], form[key], rows, same, f"{where}[{key!r}]") for key in form}
        return _with_values(first, values)
    if any(not isinstance(tree, (list, tuple)) or len(tree) != len(form) for tree in trees):
        raise _changed(where)
    return like(
        first,
        [_walk([tree[i] for tree in trees], part, rows, same, f"{where}[{i}]") for i, part in enumerate(form)],
    )


def _one(parts: list[Any], where: str) -> Any:
    first = parts[0]
    for part in parts[1:]:
        equal = torch.equal(first, part) if isinstance(first, Tensor) and isinstance(part, Tensor) else first == part
        if not equal:
            wrong = f"is one value for the whole batch ({first!r}) and another ({part!r}) in the next one"
            raise UnsupportedDataFormatException(
                where,
                wrong,
                "Sifted samples of several batches share one value",
                "Give it per sample, drop it, or use your own SiftingBatchTransform (batch_transforms)",
            )
    return first


def _changed(where: str) -> UnsupportedDataFormatException:
    return UnsupportedDataFormatException(where, "has another structure than in the first batch", "All must be equal")


def sizes(data: Any, form: Any) -> set[int]:
    """Return the set of row counts of all leaves with rows."""
    found: set[int] = set()
    _walk([data], form, lambda parts, _: found.add(len(parts[0])), lambda parts, _: None)
    return found
