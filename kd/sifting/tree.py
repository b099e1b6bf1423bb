"""Nested batches: dicts, lists and tuples with rows at their leaves.

Not `torch.utils._pytree`: it knows exact classes only. A transformers `BatchEncoding`, a UserDict, would be one leaf
unless registered for the whole process. And whether a list is a node or holds one entry per sample (`ROWS`) depends on
the first batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kd.sifting.batch import SiftingBatch, join_rows, like, take_rows
from kd.sifting.config import UnsupportedDataFormatException

ROWS, CONSTANT = "one entry a sample", "one value for all samples"
"""The two kinds of leaves of a batch; `state_dict` saves these strings."""


class TreeBatch(SiftingBatch):
    """A nested batch, and its form: dicts and lists with ROWS or CONSTANT at their leaves."""

    def __init__(self, data: Any, form: Any) -> None:
        self.data, self.form = data, form
        sizes: set[int] = set()
        _map(lambda kind, parts, _: sizes.add(len(parts[0])) if kind == ROWS else None, form, [data])
        self.sizes = sorted(sizes)

    def __len__(self) -> int:
        return self.sizes[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def take(self, index: Tensor) -> TreeBatch:
        def leaf(kind: str, parts: list[Any], where: str) -> Any:
            return take_rows(parts[0], index) if kind == ROWS else parts[0]

        return TreeBatch(_map(leaf, self.form, [self.data]), self.form)

    def join(self, others: Sequence[TreeBatch]) -> TreeBatch:
        def leaf(kind: str, parts: list[Any], where: str) -> Any:
            return join_rows(parts, where) if kind == ROWS else _one(parts, where)

        return TreeBatch(_map(leaf, self.form, [self.data, *(batch.data for batch in others)]), self.form)


def to_device(value: Any, device: torch.device) -> Any:
    """Return a nested batch with all its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return _with_values(value, {key: to_device(item, device) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return like(value, [to_device(item, device) for item in value])
    return value


def _map(function: Callable[[str, list[Any], str], Any], form: Any, trees: list[Any], where: str = "batch") -> Any:
    """Return trees of one form as one tree, with `function(kind, leaves, where)` at each leaf."""
    if isinstance(form, str):
        return function(form, trees, where)
    keys = _keys(form)
    if any(_keys(tree) != keys for tree in trees):
        wrong = "has another structure than in the first batch"
        raise UnsupportedDataFormatException(where, wrong, "All must be equal")
    values = {key: _map(function, form[key], [tree[key] for tree in trees], f"{where}[{key!r}]") for key in keys}
    first = trees[0]
    return _with_values(first, values) if isinstance(first, Mapping) else like(first, list(values.values()))


def _keys(tree: Any) -> Any:
    """Return the keys of a mapping or the positions of a sequence; None for anything else."""
    if isinstance(tree, Mapping):
        return tree.keys()
    return range(len(tree)) if isinstance(tree, (list, tuple)) else None


def _with_values(mapping: Any, values: dict[Any, Any]) -> Any:
    result = copy.copy(mapping)  # keeps the class: a BatchEncoding, an OrderedDict
    for key, value in values.items():
        result[key] = value
    return result


def _one(parts: list[Any], where: str) -> Any:
    """Return the value that all batches share."""
    first = parts[0]
    for part in parts[1:]:
        equal = torch.equal(first, part) if isinstance(first, Tensor) and isinstance(part, Tensor) else first == part
        if not equal:
            raise UnsupportedDataFormatException(
                where,
                f"is one value for the whole batch ({first!r}) and another ({part!r}) in the next one",
                "Sifted samples of several batches share one value",
                "Give it per sample, drop it, or use your own SiftingBatchTransform (batch_transforms)",
            )
    return first
