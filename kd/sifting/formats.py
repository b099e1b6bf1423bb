"""The structure of a batch is detected once, from the first batch.

A batch is a list, a tuple, a dict or a tensor.

Not `torch.utils._pytree`: it knows exact classes only. A transformers `BatchEncoding`,
a UserDict, would be one leaf unless registered for the whole process. And whether a
list is a node or holds one entry per sample (`ROWS`) depends on the first batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kd.sifting.batch import (
    SiftingBatch,
    SiftingBatchTransform,
    join_rows,
    same_sequence,
    take_rows,
)
from kd.sifting.config import UnsupportedDataFormatException

REMEDY = "Pass your own SiftingBatchTransform as batch_transforms"
SAMPLE = 0  # `batch_format_index`: dimension 0 of the batch holds samples
FEATURE = 1  # the same: dimension 0 holds features, dimension 1 samples
ROWS = "one entry a sample"  # kind of leaf; `state_dict` saves it
CONSTANT = "one value for all samples"  # the other kind of leaf


class DefaultTransform(SiftingBatchTransform):
    """Split lists, tuples, dicts and tensors into samples.

    A list holds samples (`batch[i]` is sample i; `batch_format_index=0`) or features
    (`batch[i]` is feature i of all samples, as torch's default collation makes it;
    `batch_format_index=1`). The batch size tells which. Where both dimensions match it,
    `batch_format_index` is required. A bare tensor is [B, ...] or [features, B, ...].
    Inside a dict or a list of features everything is batch-first; numbers and strings
    there belong to all samples.
    """

    def __init__(self, batch_size: int | None, index: int | None, alone: bool) -> None:
        """Convert batches of a loader.

        Args:
            batch_size: samples of a full batch; None: unknown.
            index: `batch_format_index`; None: it is detected.
            alone: whether the loader has one batch, which may be shorter than its batch
                size.
        """
        self.batch_size = batch_size
        self.index = index
        self.alone = alone
        self.form: Any = None

    def transform(self, batch: Any) -> TreeBatch:
        if self.form is None:
            self.form = self._detect(batch)
        if isinstance(batch, Tensor) and self.index == FEATURE:
            batch = batch.movedim(1, 0)
        tree = TreeBatch(batch, self.form)
        if len(tree.sizes) != 1:
            raise _mismatch(
                "batch", tree.sizes, "its parts differ in their number of samples"
            )
        return tree

    def reverse_transform(self, batch: Any) -> Any:
        if isinstance(batch.data, Tensor) and self.index == FEATURE:
            return batch.data.movedim(0, 1)
        return batch.data

    def _detect(self, batch: Any) -> Any:
        """Return the form of a batch, and set `index` where the batch is no dict."""
        if isinstance(batch, Mapping):
            lengths = [_row_count(value) for value in batch.values()]
            lengths = [length for length in lengths if length is not None]
            if not lengths:
                wrong = "Unable to index the batch: no value has one entry per sample"
                raise UnsupportedDataFormatException("batch", wrong, "", REMEDY)
            return _tree_form(batch, self._size(lengths, default=lengths[0]), "batch")
        if not isinstance(batch, (list, tuple, Tensor)):
            wrong = f"Batches of type {type(batch)} are not supported by default"
            raise UnsupportedDataFormatException(
                "batch", wrong, "Lists, tuples, dicts and tensors are", REMEDY
            )
        samples, features = _dimensions(batch)
        if self.index is None:
            self.index = self._sample_dimension(batch, samples, features)
        if self.index == SAMPLE or isinstance(batch, Tensor):
            return ROWS
        assert features is not None
        return [
            _tree_form(item, features, f"batch[{i}]") for i, item in enumerate(batch)
        ]

    def _size(self, lengths: Sequence[int | None], default: int) -> int:
        """Return the batch size, or `default`.

        `default`: the loader has no batch size, or its only batch is shorter.
        """
        if self.batch_size is None or (self.alone and self.batch_size not in lengths):
            return default
        return self.batch_size

    def _sample_dimension(self, batch: Any, samples: int, features: int | None) -> int:
        """Return `SAMPLE` or `FEATURE`, from the batch size."""
        default = samples if isinstance(batch, Tensor) or features is None else features
        size = self._size([samples, features], default)
        if samples == features == size:
            raise UnsupportedDataFormatException(
                "batch",
                f"Both dimension 0 and dimension 1 match batch size {size}",
                "A batch is a sequence of samples or of features",
                "Set batch_format_index: 0 where batch[i] is a sample, 1 where batch[i]"
                " is a feature of all samples (torch's default collation)",
            )
        if size not in (samples, features):
            raise _mismatch("batch", size, f"they are {samples} and {features}")
        return SAMPLE if size == samples else FEATURE


def _dimensions(batch: Any) -> tuple[int, int | None]:
    """Return the sizes of dimensions 0 and 1.

    None: there is no dimension 1, or its sizes differ.
    """
    if isinstance(batch, Tensor) and batch.ndim:
        return len(batch), batch.shape[1] if batch.ndim > 1 else None
    if isinstance(batch, Tensor) or not len(batch):
        raise _not_indexable(batch, "batch")
    lengths = {_row_count(item) for item in batch if not _is_constant(item)}
    return len(batch), lengths.pop() if len(lengths) == 1 else None


def _tree_form(value: Any, size: int, config_path: str) -> Any:
    """Return which leaves of `value` have `size` rows."""
    if _is_constant(value):
        return CONSTANT
    if isinstance(value, Mapping):
        return {
            key: _tree_form(item, size, f"{config_path}[{key!r}]")
            for key, item in value.items()
        }
    if isinstance(value, (Tensor, np.ndarray)):
        if len(value) != size:
            raise _mismatch(config_path, size, f"its shape is {list(value.shape)}")
        return ROWS
    if not isinstance(value, (list, tuple)):
        raise _not_indexable(value, config_path)
    columns = [_row_count(item) == size for item in value]
    if len(value) == size > 1 and all(columns):
        wrong = f"holds {size} samples, or {size} features of {size} samples"
        remedy = (
            "Choose another batch size, stack samples or features in a tensor, or pass"
            " your own SiftingBatchTransform"
        )
        raise UnsupportedDataFormatException(
            config_path, wrong, "A list that can be read in one way", remedy
        )
    if len(value) == size and not all(columns):
        return ROWS
    if not any(columns):
        raise _mismatch(
            config_path, size, f"it is a {type(value).__name__} of {len(value)}"
        )
    return [
        _tree_form(item, size, f"{config_path}[{i}]") for i, item in enumerate(value)
    ]


def _is_constant(value: Any) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return not value.ndim
    return value is None or isinstance(
        value, (str, bytes, bool, int, float, complex, np.generic)
    )


def _row_count(value: Any) -> int | None:
    """Return the length of a part of a batch, or None where it has none."""
    if isinstance(value, Mapping):
        items = [item for item in value.values() if not _is_constant(item)]
        return _row_count(items[0]) if items else None
    if _is_constant(value) or not hasattr(value, "__len__"):
        return None
    return len(value)


def _not_indexable(value: Any, config_path: str) -> UnsupportedDataFormatException:
    return UnsupportedDataFormatException(
        config_path, f"Unable to index the batch of type {type(value)}", "", REMEDY
    )


def _mismatch(
    config_path: str, size: Any, sizes: str
) -> UnsupportedDataFormatException:
    wrong = (
        f"Batch size {size} does not match dimension 0 or dimension 1 sizes: {sizes}"
    )
    return UnsupportedDataFormatException(
        config_path, wrong, "One of them must be the sample dimension", REMEDY
    )


class TreeBatch(SiftingBatch):
    """A nested batch has a form: dicts and lists with ROWS or CONSTANT at leaves."""

    def __init__(self, data: Any, form: Any) -> None:
        self.data = data
        self.form = form
        sizes: set[int] = set()

        def measure(kind: str, leaves: list[Any], config_path: str) -> None:
            if kind == ROWS:
                sizes.add(len(leaves[0]))

        _map_trees(measure, form, [data])
        self.sizes = sorted(sizes)

    def __len__(self) -> int:
        return self.sizes[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def take(self, index: Tensor) -> TreeBatch:
        def take_leaf(kind: str, leaves: list[Any], config_path: str) -> Any:
            return take_rows(leaves[0], index) if kind == ROWS else leaves[0]

        return TreeBatch(_map_trees(take_leaf, self.form, [self.data]), self.form)

    def join(self, others: Sequence[TreeBatch]) -> TreeBatch:
        def join_leaf(kind: str, leaves: list[Any], config_path: str) -> Any:
            unite = join_rows if kind == ROWS else _common_value
            return unite(leaves, config_path)

        trees = [self.data, *(batch.data for batch in others)]
        return TreeBatch(_map_trees(join_leaf, self.form, trees), self.form)


def to_device(value: Any, device: torch.device) -> Any:
    """Return a nested batch with all its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return _with_values(
            value, {key: to_device(item, device) for key, item in value.items()}
        )
    if isinstance(value, (list, tuple)):
        return same_sequence(value, [to_device(item, device) for item in value])
    return value


def _map_trees(
    function: Callable[[str, list[Any], str], Any],
    form: Any,
    trees: list[Any],
    config_path: str = "batch",
) -> Any:
    """Return trees of one form as one tree.

    `function(kind, leaves, config_path)` makes each leaf.
    """
    if isinstance(form, str):
        return function(form, trees, config_path)
    keys = _tree_keys(form)
    if any(_tree_keys(tree) != keys for tree in trees):
        wrong = "has another structure than in the first batch"
        raise UnsupportedDataFormatException(config_path, wrong, "All must be equal")
    values = {}
    for key in keys:
        children = [tree[key] for tree in trees]
        values[key] = _map_trees(
            function, form[key], children, f"{config_path}[{key!r}]"
        )
    first = trees[0]
    if isinstance(first, Mapping):
        return _with_values(first, values)
    return same_sequence(first, list(values.values()))


def _tree_keys(tree: Any) -> Any:
    """Return the keys of a mapping or the positions of a sequence, else None."""
    if isinstance(tree, Mapping):
        return tree.keys()
    return range(len(tree)) if isinstance(tree, (list, tuple)) else None


def _with_values(mapping: Any, values: dict[Any, Any]) -> Any:
    result = copy.copy(mapping)  # keeps the class: a BatchEncoding, an OrderedDict
    for key, value in values.items():
        result[key] = value
    return result


def _common_value(values: list[Any], config_path: str) -> Any:
    first = values[0]
    for value in values[1:]:
        if isinstance(first, Tensor) and isinstance(value, Tensor):
            equal = torch.equal(first, value)
        else:
            equal = first == value
        if not equal:
            wrong = (
                f"is one value for the whole batch ({first!r}) and another ({value!r})"
                " in the next one"
            )
            allowed = "Sifted samples of several batches share one value"
            remedy = (
                "Give it per sample, drop it, or use your own SiftingBatchTransform"
                " (batch_transforms)"
            )
            raise UnsupportedDataFormatException(config_path, wrong, allowed, remedy)
    return first
