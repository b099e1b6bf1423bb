"""A Hugging Face dataset: from the hub by name, from a local folder, or saved with
`save_to_disk`.

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
from kd.parts.datasets._columns import Names, Repeated
from kd.parts.datasets._decode import read_file, refuse
from kd.parts.datasets._source import (
    LabelColumn,
    Listed,
    SplitRequest,
    Storage,
    facts_of,
    source,
    stamp,
)
from kd.parts.datasets._splits import check_splits

WHERE = "data.path"
ROWS = 10_000  # rows per lookup of sizes


def facts(options: "Options") -> DatasetFacts:
    """Return the dataset's facts."""
    return facts_of(options, "test_split", "set" if options.label_keys else "class")


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
    """Rows of a memory-mapped table, with kd's own decoder, so that corrupt images are
    handled as in other datasets.
    """

    config_path = WHERE

    def __init__(self, table: Any, split: str, image_key: str) -> None:
        super().__init__(Names(()), *_files(table, image_key))
        self._table, self._split, self._image_key = table, split, image_key
        self._number(np.arange(len(table)))

    def _number(self, rows: np.ndarray) -> None:
        self._rows, self.names = rows, Names([rows.astype("<i8").tobytes()])

    def take(self, rows: np.ndarray) -> "TableRows":
        taken = copy.copy(self)
        taken.sizes, taken.stamps = self.sizes[rows], self.stamps[rows]
        taken._number(self._rows[rows])
        return taken

    def keys(self) -> Iterator[bytes]:
        return (str(row).encode() for row in self._rows)

    def name(self, row: int) -> str:
        return f"{self._split}[{self._rows[row]}]"

    def read(self, row: int) -> bytes:
        cell = self._table[int(self._rows[row])][self._image_key] or {}
        data: bytes | None = cell.get("bytes")
        path: Any = cell.get("path")
        if data is None and path is None:
            raise refuse(self.subject(row), WHERE, "the row holds no image")
        return (
            read_file(path, f"{self.subject(row)} ({os.path.basename(path)})", WHERE)
            if data is None
            else data
        )


def build(
    options: Options, split: str, classes: Sequence[str] | None, labels: str = "all"
) -> Listed:
    """Load a split; unlabelled data needs no label column."""
    wrong, remedy = (
        "the dataset 'hf' needs the package datasets",
        "Run: pip install 'PATH/kd[hf]'",
    )
    hub = import_optional("datasets", "data.kind", wrong, remedy)
    key = (
        "train_split" if options.val_fraction and split != "test" else f"{split}_split"
    )
    splits = _load(hub, options)
    split_name = getattr(options, key)
    if split_name not in splits:
        wrong = f"'{options.path}' has no split '{split_name}'"
        other = "Choose one, or set data.val_fraction=0.1 to hold out training images"
        remedy = did_you_mean(split_name, splits) or other
        raise DataError(f"data.{key}", wrong, f"Allowed: {', '.join(splits)}", remedy)
    table = splits[split_name]
    label_column = _labels(hub, table, options, labels)
    groups = (
        table.with_format(None)[_column(hub, table.features, "group", options.group)]
        if options.group
        else ()
    )
    image_key = _column(hub, table.features, "image_key", options.image_key)
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


def _labels(hub: Any, table: Any, options: Options, labels: str) -> LabelColumn:
    if labels == "none":
        return LabelColumn(Repeated([""], np.zeros(len(table), np.int32)))
    if options.label_keys:
        return LabelColumn(
            _sets(table, options.label_keys, labels == "some"), options.label_keys
        )
    key = _column(hub, table.features, "label_key", options.label_key)
    cells = enumerate(table.with_format(None)[key])
    written = Repeated.of_each(
        _written(value, row, key, labels == "some") for row, value in cells
    )
    return LabelColumn(*name_labels(written, getattr(table.features[key], "names", ())))


def _files(table: Any, image_key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the encoded size of every row's image, int64 [N] (-1: missing), and
    stamps, uint64 [N].
    """
    # No image is read.
    compute: Any = import_module("pyarrow.compute")  # comes with `datasets`

    whole = sum(stamp(os.stat(file["filename"])) for file in table.cache_files) % 2**64
    parts, raw, stamps = (
        [],
        table.with_format("arrow"),
        np.full(len(table), whole, np.uint64),
    )
    for start in range(0, len(table), ROWS):
        cells = raw[start : start + ROWS][image_key].combine_chunks()
        lengths = compute.binary_length(compute.struct_field(cells, "bytes"))
        sizes = (
            compute.fill_null(lengths, -1)
            .to_numpy(zero_copy_only=False)
            .astype(np.int64)
        )
        paths = (
            compute.struct_field(cells, "path").to_pylist() if (sizes < 0).any() else []
        )
        for row in np.flatnonzero(sizes < 0):
            if paths[row] and os.path.isfile(paths[row]):
                status = os.stat(paths[row])
                sizes[row], stamps[start + row] = status.st_size, stamp(status)
        parts.append(sizes)
    return np.concatenate(parts) if parts else np.zeros(0, np.int64), stamps


def _load(hub: Any, options: Options) -> dict[str, Any]:
    """Return all splits; the hub's loader prepares all of them anyway."""
    path = os.path.expanduser(options.path)
    saved = [
        name
        for name in ("dataset_dict.json", "state.json")
        if os.path.isfile(os.path.join(path, name))
    ]
    if not os.path.exists(path) and (
        path.startswith((".", "/")) or path.count("/") > 1
    ):
        wrong = f"the folder '{path}' does not exist"
        raise DataError(
            WHERE, wrong, "A folder, or a name on the hub", "Check the path"
        )
    try:
        loaded = (
            hub.load_from_disk(path)
            if saved
            else hub.load_dataset(path, options.name or None)
        )
        if not saved and _outdated(path, loaded):
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
    return (
        dict(loaded)
        if isinstance(loaded, dict)
        else {str(loaded.split or "train"): loaded}
    )


def _outdated(path: str, tables: Mapping[str, Any]) -> bool:
    """Return whether a local parquet file has changed since its rows were copied to the
    cache.
    """
    # The hub's loader compares mtime alone, which a copy of a file may keep; nothing
    # keeps ctime.
    copied = [
        os.path.getmtime(file["filename"])
        for table in tables.values()
        for file in table.cache_files
    ]
    changed = map(os.path.getctime, Path(path).rglob("*.parquet"))
    return bool(copied) and max(changed, default=0) > min(copied)


SIZES = (8, 16, 32, 64)  # bits of an integer that may be a label
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in SIZES)
KINDS = ("string", "large_string", "bool", "float32", "float64", *INTEGERS)


def _column(hub: Any, features: Any, option: str, key: str) -> str:
    """Return the column of an option; by default the only column declared as such."""
    image = option == "image_key"
    own = [
        name
        for name, one in features.items()
        if isinstance(one, hub.Image if image else hub.ClassLabel)
    ]
    if image:  # Hugging Face's form of an image without the declared type
        own += [
            name
            for name, one in features.items()
            if isinstance(one, dict) and {*one} == {"bytes", "path"}
        ]
    if not key and len(own) == 1:
        return own[0]
    if not key:
        what = "image" if image else "class-label"
        wrong = (
            f"several {what} columns: {', '.join(own)}" if own else f"no {what} column"
        )
        raise DataError(
            f"data.{option}",
            wrong,
            f"Columns: {', '.join(features)}",
            f"Set data.{option}",
        )
    able = ("binary",) if image else KINDS
    fits = [
        name
        for name, one in features.items()
        if (image and name in own) or getattr(one, "dtype", "") in able
    ]
    if key in fits:
        return key
    what = "images" if image else "class labels, integers or text"
    wrong = (
        f"the column '{key}' does not hold {what}"
        if key in features
        else f"there is no column '{key}'"
    )
    remedy = did_you_mean(key, fits) or "Choose one of them"
    if (
        key in features
        and not image
        and "list" in str(features[key]).lower() + str(type(features[key])).lower()
    ):
        wrong = f"the column '{key}' holds lists of labels"
        remedy = (
            "For several labels per image write a column of 0 and 1 for each class, and"
            " name them in data.label_keys"
        )
    raise DataError(
        f"data.{option}", wrong, f"Allowed: {', '.join(fits) or 'none fits'}", remedy
    )


def _written(value: Any, row: int, key: str, some: bool) -> str:
    if (
        value is None or value == "" or value == -1
    ):  # -1: the hub's mark of an unlabelled row
        if some:
            return ""
        wrong = f"row {row} has no label in the column '{key}' ({value!r})"
        raise DataError(
            "data.label_key",
            wrong,
            "",
            "Choose a labelled split, or set data.labels=some",
        )
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _sets(table: Any, keys: Sequence[str], some: bool) -> np.ndarray:
    """Return the labels from columns of 0 and 1, int8 [N, C]; -1 for a row without
    values.
    """
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
    bare = (cells == -1).all(1)
    wrong = np.argwhere(
        ((cells != 0) & (cells != 1) & ~bare[:, None]) | (bare[:, None] & (not some))
    )
    if len(wrong):
        row, column = wrong[0]
        found = (
            f"row {row} has"
            f" {'no value' if cells[row, column] == -1 else cells[row, column]} in"
            f" '{keys[column]}'"
        )
        raise DataError(
            "data.label_keys",
            found,
            "0 or 1",
            "Correct it, or choose columns of 0 and 1",
        )
    return cells.astype(np.int8)
