"""Detect the structure of a list, tuple, dict or tensor batch, once, from the first batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from kd.sifting.batch import SiftingBatchTransform
from kd.sifting.config import UnsupportedDataFormatException
from kd.sifting.tree import CONSTANT, ROWS, TreeBatch

REMEDY = "Pass your own SiftingBatchTransform as batch_transforms"
SAMPLE, FEATURE = 0, 1
"""`batch_format_index`: the sample dimension of the batch."""


class DefaultTransform(SiftingBatchTransform):
    """Split lists, tuples, dicts and tensors into samples.

    A list holds samples (`batch[i]` is sample i; `batch_format_index=0`) or features (`batch[i]` is feature i of all
    samples, as torch's default collation makes it; `batch_format_index=1`). The batch size tells which. Where both
    dimensions match it, `batch_format_index` is required. A bare tensor is [B, ...] or [features, B, ...]. Inside a
    dict or a list of features everything is batch-first; numbers and strings there belong to all samples.
    """

    def __init__(self, batch_size: int | None, index: int | None, alone: bool) -> None:
        """`alone`: the loader has one batch, which may be shorter than its batch size."""
        self.batch_size, self.index, self.alone = batch_size, index, alone
        self.form: Any = None

    def transform(self, batch: Any) -> TreeBatch:
        if self.form is None:
            self.form = self._detect(batch)
        if isinstance(batch, Tensor) and self.index == FEATURE:
            batch = batch.movedim(1, 0)
        tree = TreeBatch(batch, self.form)
        if len(tree.sizes) != 1:
            raise _mismatch("batch", tree.sizes, "its parts differ in their number of samples")
        return tree

    def reverse_transform(self, batch: Any) -> Any:
        return batch.data.movedim(0, 1) if isinstance(batch.data, Tensor) and self.index == FEATURE else batch.data

    def _detect(self, batch: Any) -> Any:
        """Return the form of a batch, and set `index` where the batch is no dict."""
        if isinstance(batch, Mapping):
            lengths = [length for value in batch.values() if (length := _length(value)) is not None]
            if not lengths:
                wrong = "Unable to index the batch: no value has one entry per sample"
                raise UnsupportedDataFormatException("batch", wrong, "", REMEDY)
            return _form(batch, self._size(lengths, default=lengths[0]), "batch")
        if not isinstance(batch, (list, tuple, Tensor)):
            wrong = f"Batches of type {type(batch)} are not supported by default"
            raise UnsupportedDataFormatException("batch", wrong, "Lists, tuples, dicts and tensors are", REMEDY)
        samples, features = _dimensions(batch)
        if self.index is None:
            self.index = self._which(batch, samples, features)
        if self.index == SAMPLE or isinstance(batch, Tensor):
            return ROWS
        assert features is not None
        return [_form(part, features, f"batch[{i}]") for i, part in enumerate(batch)]

    def _size(self, lengths: Sequence[int | None], default: int) -> int:
        """Return the batch size; `default` if the loader has none, or if its only batch is shorter."""
        if self.batch_size is None or (self.alone and self.batch_size not in lengths):
            return default
        return self.batch_size

    def _which(self, batch: Any, samples: int, features: int | None) -> int:
        """Return whether the batch is a list of samples or of features, from the batch size."""
        default = samples if isinstance(batch, Tensor) or features is None else features
        size = self._size([samples, features], default)
        if samples == features == size:
            raise UnsupportedDataFormatException(
                "batch",
                f"Both dimension 0 and dimension 1 match batch size {size}",
                "A batch is a sequence of samples or of features",
                "Set batch_format_index: 0 where batch[i] is a sample, 1 where batch[i] is a feature of "
                "all samples (torch's default collation)",
            )
        if size not in (samples, features):
            raise _mismatch("batch", size, f"they are {samples} and {features}")
        return SAMPLE if size == samples else FEATURE


def _dimensions(batch: Any) -> tuple[int, int | None]:
    """Return the sizes of dimensions 0 and 1; None where there is no dimension 1, or its sizes differ."""
    if isinstance(batch, Tensor) and batch.ndim:
        return len(batch), batch.shape[1] if batch.ndim > 1 else None
    if isinstance(batch, Tensor) or not len(batch):
        raise _unable(batch, "batch")
    lengths = {_length(part) for part in batch if not _is_constant(part)}
    return len(batch), lengths.pop() if len(lengths) == 1 else None


def _form(value: Any, size: int, where: str) -> Any:
    """Return which leaves of `value` have `size` rows."""
    if _is_constant(value):
        return CONSTANT
    if isinstance(value, Mapping):
        return {key: _form(item, size, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (Tensor, np.ndarray)):
        if len(value) != size:
            raise _mismatch(where, size, f"its shape is {list(value.shape)}")
        return ROWS
    if not isinstance(value, (list, tuple)):
        raise _unable(value, where)
    columns = [_length(item) == size for item in value]
    if len(value) == size and not all(columns):
        return ROWS
    if not any(columns):
        raise _mismatch(where, size, f"it is a {type(value).__name__} of {len(value)}")
    return [_form(item, size, f"{where}[{i}]") for i, item in enumerate(value)]


def _is_constant(value: Any) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return not value.ndim
    return value is None or isinstance(value, (str, bytes, bool, int, float, complex, np.generic))


def _length(value: Any) -> int | None:
    """Return the length of a part of a batch, or None where it has none."""
    if isinstance(value, Mapping):
        return next((_length(item) for item in value.values() if not _is_constant(item)), None)
    return len(value) if hasattr(value, "__len__") and not _is_constant(value) else None


def _unable(value: Any, where: str) -> UnsupportedDataFormatException:
    return UnsupportedDataFormatException(where, f"Unable to index the batch of type {type(value)}", "", REMEDY)


def _mismatch(where: str, size: Any, sizes: str) -> UnsupportedDataFormatException:
    wrong = f"Batch size {size} does not match dimension 0 or dimension 1 sizes: {sizes}"
    return UnsupportedDataFormatException(where, wrong, "One of them must be the sample dimension", REMEDY)
