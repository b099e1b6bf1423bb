"""Recognize folder layouts for `kd init` by names of splits and by tables."""

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

from kd.files.folders import folders
from kd.files.tables import DELIMITERS, parse_table, read_text

SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev"),
    "test": ("test", "testing", "eval"),
}
"""Names of splits, the most usual first."""
LABEL_COLUMNS = ("label", "class", "category", "species", "target")
HELD_OUT = {"val_fraction": 0.1}  # used if no folder has the name of a validation split
# errors from a file that is no table of images
NO_TABLE = (
    ValueError,
    LookupError,
    AttributeError,
    StopIteration,
    NotImplementedError,
    csv.Error,
)
MOST_ROOTS = 20  # most inner folders searched for the images of a table
Keys = dict[str, Any]  # keys of the section `data`, without `kind`


def recognize_tables(folder: Path, kind: str) -> Keys | None:
    """Return the keys of tables of a kind, if the training table names an image."""
    inner = folders(folder)
    by_split = _find_tables(folder, inner)
    first = by_split.get("train") or by_split.get("")
    if first is None:
        return None
    by_split.pop("", None)
    ending = "labels" if kind == "multilabel" else "list"
    for root in [folder, *(folder / name for name in inner[:MOST_ROOTS])]:
        with suppress(*NO_TABLE):
            table_kind, table_keys = _recognize_table(
                first, root if first.parent == folder else first.parent
            )
            if table_kind != kind:
                return None
            lists = {
                f"{split}_{ending}": os.path.relpath(path, root)
                for split, path in {"train": first, **by_split}.items()
            }
            held_out = {} if "val" in by_split else HELD_OUT
            return {"root": str(root), **lists, **held_out, **table_keys}
    return None


def _find_tables(folder: Path, inner: Sequence[str]) -> dict[str, Path]:
    """Return the tables in a folder by the splits that their names say; "": none."""
    split_names = {name for names in SPLITS.values() for name in names}
    inside = [  # Roboflow's form
        file
        for name in inner
        if name.lower() in split_names
        for file in (folder / name).glob("*.csv")
    ]
    by_split: dict[str, Path] = {}
    for path in [*sorted(inside), *sorted(folder.iterdir(), reverse=True)]:
        if path.suffix in (".csv", ".tsv", ".json"):
            title = path.stem if path.parent == folder else path.parent.name
            words = re.split("[^a-z]+", title.lower())
            splits = [
                split
                for split, names in SPLITS.items()
                if not {*words}.isdisjoint(names)
            ]
            by_split[splits[0] if splits else ""] = path
    return by_split


def _recognize_table(path: Path, root: Path) -> tuple[str, Keys]:
    """Return kind and keys of a table of images in `root`, or raise a `NO_TABLE`."""

    def is_image(name: str) -> bool:
        return 0 < len(name) < 200 and (
            (root / name).is_file() or any(root.glob(f"{escape(name)}.*"))
        )

    if path.suffix == ".json":
        (name, labels), *_ = json.loads(path.read_text(encoding="utf-8")).items()
        if not isinstance(labels, list) or not is_image(name):
            raise ValueError("no image with a list of labels")
        return "multilabel", {}
    header, lines = parse_table(read_text(path), DELIMITERS[path.suffix])
    rows = [row for _, row in lines]
    image = next(i for i, cell in enumerate(rows[0]) if is_image(cell.strip()))
    other_columns = [i for i in range(len(header)) if i != image]
    if image == 0 and len(other_columns) > 1:
        values = {cell.strip() for row in rows for cell in row[1:]}
        if values <= {"0", "1", ""}:
            return "multilabel", {}
    if len(other_columns) == 1:
        label = other_columns[0]
    else:
        label = next(
            i for i in other_columns if header[i].strip().lower() in LABEL_COLUMNS
        )
    signs = Counter(sign for row in rows for sign in "|;" if sign in row[label])
    if signs and image == 0 and len(other_columns) == 1:
        return "multilabel", {"separator": signs.most_common(1)[0][0]}
    return "csv", {
        "image_key": header[image].strip(),
        "label_key": header[label].strip(),
    }
