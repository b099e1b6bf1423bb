"""Read a Hugging Face dataset from the hub, a local folder, or `save_to_disk`.

Needs the extra: `pip install 'PATH/kd[hf]'`.
"""

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from kd.core.errors import DataError, did_you_mean, error_summary, import_optional
from kd.core.facts import DatasetFacts
from kd.core.keys import Keys, ProperFraction, file_key, keys
from kd.parts.datasets._classes import name_labels
from kd.parts.datasets._columns import Categorical, Names
from kd.parts.datasets._decode import corrupt_image, read_image_file
from kd.parts.datasets._source import (
    ImageSource,
    LabelColumn,
    SplitRequest,
    Storage,
    dataset_facts,
    file_stamp,
    source,
)
from kd.parts.datasets._splits import check_splits

WHERE = "data.path"
ROWS = 10_000  # rows per lookup of sizes


def facts(options: "Options") -> DatasetFacts:
    """Return the dataset's facts."""
    return dataset_facts(
        options, "test_split", "set" if options.label_keys else "class"
    )


@keys
class Options(Keys):
    """Dataset, splits and columns."""

    path: str = file_key(or_name=True)
    """Name on the hub (`ethz/food101`), or a local folder of images, of parquet files
    or from `save_to_disk`.
    """
    name: str = ""
    """Configuration of the dataset, if it has several."""
    train_split: str = "train"
    """Split to train on."""
    val_split: str = "validation"
    """Split to validate on; not used with `val_fraction`."""
    test_split: str = ""
    """Test split: scored once, at the end of a run, and never used for choices. Empty:
    no test split.
    """
    val_fraction: ProperFraction = 0.0
    """Share of each class of `train_split` held out for validation, chosen by a hash of
    the row number.
    """
    group: str = ""
    """Column of what belongs together, such as the clip of a frame, and stays in one
    split if kd splits by hash.
    """
    image_key: str = ""
    """Column of the images; empty: the only image column."""
    label_key: str = ""
    """Column of the labels; empty: the only class-label column."""

    label_keys: tuple[str, ...] = ()
    """Columns of 0 and 1, one per class, instead of `label_key`: an image then has
    several labels.
    """

    def __post_init__(self) -> None:
        if self.label_keys and (
            self.label_key or len({*self.label_keys}) < max(2, len(self.label_keys))
        ):
            raise ValueError(
                "label_keys must name two columns or more, each once, and label_key"
                " none"
            )
        if not self.path:
            raise ValueError("path is empty; it must be a dataset name or a folder")
        check_splits(self, "split")


class TableRows(Storage):
    """Read rows of a memory-mapped table.

    kd's own decoder handles corrupt images as in other datasets.
    """

    config_path = WHERE

    def __init__(self, table: Any, split: str, image_key: str) -> None:
        super().__init__(Names(()), *_sizes_and_stamps(table, image_key))
        self._table = table
        self._split = split
        self._image_key = image_key
        self._set_rows(np.arange(len(table)))

    def _set_rows(self, rows: np.ndarray) -> None:
        self._rows = rows
        self.names = Names([rows.astype("<i8").tobytes()])

    def take(self, rows: np.ndarray) -> "TableRows":
        subset = copy.copy(self)
        subset.sizes = self.sizes[rows]
        subset.stamps = self.stamps[rows]
        subset._set_rows(self._rows[rows])
        return subset

    def keys(self) -> Iterator[bytes]:
        return (str(row).encode() for row in self._rows)

    def name(self, row: int) -> str:
        return f"{self._split}[{self._rows[row]}]"

    def read(self, row: int) -> bytes:
        cell = self._table[int(self._rows[row])][self._image_key] or {}
        data: bytes | None = cell.get("bytes")
        path: Any = cell.get("path")
        if data is not None:
            return data
        if path is None:
            raise corrupt_image(self.subject(row), WHERE, "the row holds no image")
        subject = f"{self.subject(row)} ({os.path.basename(path)})"
        return read_image_file(path, subject, WHERE)


def build(
    options: Options, split: str, classes: Sequence[str] | None, labels: str = "all"
) -> ImageSource:
    """Load a split; unlabelled data needs no label column."""
    hub = import_optional(
        "datasets",
        "data.kind",
        "the dataset 'hf' needs the package datasets",
        "Run: pip install 'PATH/kd[hf]'",
    )
    shared = options.val_fraction and split != "test"
    key = "train_split" if shared else f"{split}_split"
    splits = _load_splits(hub, options)
    split_name = getattr(options, key)
    if split_name not in splits:
        wrong = f"'{options.path}' has no split '{split_name}'"
        remedy = (
            did_you_mean(split_name, splits)
            or "Choose one, or set data.val_fraction=0.1 to hold out training images"
        )
        raise DataError(f"data.{key}", wrong, f"Allowed: {', '.join(splits)}", remedy)
    table = splits[split_name]
    label_column = _label_column(hub, table, options, labels)
    groups = ()
    if options.group:
        group_key = _column_name(hub, table.features, "group", options.group)
        groups = table.with_format(None)[group_key]
    image_key = _column_name(hub, table.features, "image_key", options.image_key)
    table = (
        table.select_columns([image_key])
        .cast_column(image_key, hub.Image(decode=False))
        .with_format(None)
    )
    request = SplitRequest(
        split, classes, labels, WHERE, options.val_fraction, options.group
    )
    return source(
        TableRows(table, split_name, image_key), label_column, request, map(str, groups)
    )


def _label_column(hub: Any, table: Any, options: Options, labels: str) -> LabelColumn:
    if labels == "none":
        return LabelColumn(Categorical([""], np.zeros(len(table), np.int32)))
    if options.label_keys:
        sets = _read_sets(table, options.label_keys, labels == "some")
        return LabelColumn(sets, options.label_keys)
    key = _column_name(hub, table.features, "label_key", options.label_key)
    cells = enumerate(table.with_format(None)[key])
    values = Categorical.from_values(
        _label_text(value, row, key, labels == "some") for row, value in cells
    )
    return LabelColumn(*name_labels(values, getattr(table.features[key], "names", ())))


def _sizes_and_stamps(table: Any, image_key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return encoded sizes, int64 [N] (-1: missing), and stamps, uint64 [N].

    No image is read.
    """
    compute: Any = import_module("pyarrow.compute")  # comes with `datasets`

    cache_stamps = [file_stamp(os.stat(file["filename"])) for file in table.cache_files]
    stamps = np.full(len(table), sum(cache_stamps) % 2**64, np.uint64)
    arrow_table = table.with_format("arrow")
    size_blocks = []
    for start in range(0, len(table), ROWS):
        cells = arrow_table[start : start + ROWS][image_key].combine_chunks()
        lengths = compute.binary_length(compute.struct_field(cells, "bytes"))
        known_lengths = compute.fill_null(lengths, -1)
        sizes = known_lengths.to_numpy(zero_copy_only=False).astype(np.int64)
        outside = np.flatnonzero(sizes < 0)  # images that are files of their own
        paths = []
        if len(outside):
            paths = compute.struct_field(cells, "path").to_pylist()
        for row in outside:
            if paths[row] and os.path.isfile(paths[row]):
                status = os.stat(paths[row])
                sizes[row] = status.st_size
                stamps[start + row] = file_stamp(status)
        size_blocks.append(sizes)
    return np.concatenate([np.zeros(0, np.int64), *size_blocks]), stamps


def _load_splits(hub: Any, options: Options) -> dict[str, Any]:
    """Return all splits; the hub's loader prepares all of them anyway."""
    path = os.path.expanduser(options.path)
    saved = any(
        os.path.isfile(os.path.join(path, name))
        for name in ("dataset_dict.json", "state.json")
    )
    if not os.path.exists(path) and (
        path.startswith((".", "/")) or path.count("/") > 1
    ):
        wrong = f"the folder '{path}' does not exist"
        raise DataError(
            WHERE, wrong, "A folder, or a name on the hub", "Check the path"
        )
    try:
        if saved:
            loaded = hub.load_from_disk(path)
        else:
            loaded = hub.load_dataset(path, options.name or None)
            if _outdated(path, loaded):
                loaded = hub.load_dataset(
                    path, options.name or None, download_mode="reuse_cache_if_exists"
                )
    # errors of the hub, the file system or many parsers: all mean that it cannot be
    # loaded
    except Exception as error:
        wrong = f"'{options.path}' cannot be loaded ({error_summary(error)})"
        allowed = (
            "A folder, or a name on the hub with data.name where it has several"
            " configurations"
        )
        remedy = (
            "Check the name, the network and, for a private dataset, `hf auth login`"
        )
        raise DataError(WHERE, wrong, allowed, remedy) from error
    if isinstance(loaded, dict):
        return dict(loaded)
    return {str(loaded.split or "train"): loaded}


def _outdated(path: str, tables: Mapping[str, Any]) -> bool:
    """Return whether a local parquet file changed after its rows were cached."""
    # The hub's loader compares mtime alone, which a copy of a file may keep; nothing
    # keeps ctime.
    cached_times = [
        os.path.getmtime(file["filename"])
        for table in tables.values()
        for file in table.cache_files
    ]
    change_times = map(os.path.getctime, Path(path).rglob("*.parquet"))
    return bool(cached_times) and max(change_times, default=0) > min(cached_times)


LABEL_BITS = (8, 16, 32, 64)  # bits of an integer that may be a label
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in LABEL_BITS)
LABEL_TYPES = ("string", "large_string", "bool", "float32", "float64", *INTEGERS)


def _column_name(hub: Any, features: Any, option: str, key: str) -> str:
    """Return the column of an option; by default the only column declared as such."""
    image = option == "image_key"
    declared_type = hub.Image if image else hub.ClassLabel
    declared = [
        name for name, feature in features.items() if isinstance(feature, declared_type)
    ]
    if image:  # Hugging Face's form of an image without the declared type
        declared += [
            name
            for name, feature in features.items()
            if isinstance(feature, dict) and {*feature} == {"bytes", "path"}
        ]
    if not key and len(declared) == 1:
        return declared[0]
    if not key:
        noun = "image" if image else "class-label"
        wrong = f"no {noun} column"
        if declared:
            wrong = f"several {noun} columns: {', '.join(declared)}"
        raise DataError(
            f"data.{option}",
            wrong,
            f"Columns: {', '.join(features)}",
            f"Set data.{option}",
        )
    types = ("binary",) if image else LABEL_TYPES
    fits = [
        name
        for name, feature in features.items()
        if (image and name in declared) or getattr(feature, "dtype", "") in types
    ]
    if key in fits:
        return key
    remedy = did_you_mean(key, fits) or "Choose one of them"
    if key not in features:
        wrong = f"there is no column '{key}'"
    elif image:
        wrong = f"the column '{key}' does not hold images"
    elif "list" not in f"{features[key]}{type(features[key])}".lower():
        wrong = f"the column '{key}' does not hold class labels, integers or text"
    else:
        wrong = f"the column '{key}' holds lists of labels"
        remedy = (
            "For several labels per image write a column of 0 and 1 for each class, and"
            " name them in data.label_keys"
        )
    raise DataError(
        f"data.{option}", wrong, f"Allowed: {', '.join(fits) or 'none fits'}", remedy
    )


def _label_text(value: Any, row: int, key: str, some: bool) -> str:
    # -1: the hub's mark of an unlabelled row
    if value is None or value == "" or value == -1:
        if some:
            return ""
        raise DataError(
            "data.label_key",
            f"row {row} has no label in the column '{key}' ({value!r})",
            "",
            "Choose a labelled split, or set data.labels=some",
        )
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _read_sets(table: Any, keys: Sequence[str], some: bool) -> np.ndarray:
    """Return labels from columns of 0 and 1, int8 [N, C]; -1: a row without values."""
    if absent := [key for key in keys if key not in table.features]:
        remedy = did_you_mean(absent[0], table.features) or "Choose among them"
        allowed = f"Columns: {', '.join(table.features)}"
        raise DataError(
            "data.label_keys", f"there is no column '{absent[0]}'", allowed, remedy
        )
    columns = table.with_format(None).select_columns(list(keys))[:]
    cells = np.array(
        [[-1 if cell is None else cell for cell in columns[key]] for key in keys],
        np.float64,
    ).T
    is_wrong = (cells != 0) & (cells != 1)
    if some:
        is_wrong &= ~(cells == -1).all(1, keepdims=True)
    wrong_cells = np.argwhere(is_wrong)
    if len(wrong_cells):
        row, column = wrong_cells[0]
        value = "no value" if cells[row, column] == -1 else cells[row, column]
        raise DataError(
            "data.label_keys",
            f"row {row} has {value} in '{keys[column]}'",
            "0 or 1",
            "Correct it, or choose columns of 0 and 1",
        )
    return cells.astype(np.int8)
