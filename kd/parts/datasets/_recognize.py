"""Recognize folder layouts for `kd init`: usual names of splits, and tables beside
images.
"""

import csv
import json
import os
import re
from collections import Counter
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
NO_TABLE = (
    ValueError,
    LookupError,
    AttributeError,
    StopIteration,
    NotImplementedError,
    csv.Error,
)  # of a table
MOST_ROOTS = 20  # most inner folders searched for the images of a table
Keys = dict[str, Any]  # keys of the section `data`, without `kind`


def tables(folder: Path, kind: str) -> Keys | None:
    """Return the keys of tables of a kind beside images, if the first line of the
    training table names an image.
    """
    inner = folders(folder)
    there: dict[str, Path] = {}
    splits = [
        name
        for name in inner
        if any(name.lower() in names for names in SPLITS.values())
    ]
    inside = [
        file for name in splits for file in (folder / name).glob("*.csv")
    ]  # Roboflow's form
    for path in [*sorted(inside), *sorted(folder.iterdir(), reverse=True)]:
        words = {
            *re.split(
                "[^a-z]+",
                (path.stem if path.parent == folder else path.parent.name).lower(),
            )
        }
        if path.suffix in (".csv", ".tsv", ".json"):
            there[
                next((split for split, names in SPLITS.items() if words & {*names}), "")
            ] = path
    first = there.get("train") or there.get("")
    for root in (
        [folder, *(folder / name for name in inner[:MOST_ROOTS])] if first else []
    ):
        with suppress(*NO_TABLE):
            assert first
            found, more = _table(
                first, root if first.parent == folder else first.parent
            )
            if found != kind:
                return None
            ending = "labels" if kind == "multilabel" else "list"
            lists = {
                split: os.path.relpath({**there, "train": first}[split], root)
                for split in ("train", *there)
                if split
            }
            named = {f"{split}_{ending}": path for split, path in lists.items()}
            return {
                "root": str(root),
                **named,
                **({} if "val" in there else HELD_OUT),
                **more,
            }
    return None


def _table(path: Path, root: Path) -> tuple[str, Keys]:
    """Return kind and keys of a table of images in `root`; other files raise an error
    that `tables` handles.
    """

    def is_image(name: str) -> bool:
        return 0 < len(name) < 200 and (
            (root / name).is_file() or any(root.glob(f"{escape(name)}.*"))
        )

    if path.suffix == ".json":
        name, labels = next(iter(json.loads(path.read_text(encoding="utf-8")).items()))
        return {True: "multilabel"}[isinstance(labels, list) and is_image(name)], {}
    header, lines = parse_table(read_text(path), DELIMITERS[path.suffix])
    rows = [row for _, row in lines]
    image = next(i for i, cell in enumerate(rows[0]) if is_image(cell.strip()))
    others = [i for i in range(len(header)) if i != image]
    if (
        image == 0
        and len(others) > 1
        and {cell.strip() for row in rows for cell in row[1:]} <= {"0", "1", ""}
    ):
        return "multilabel", {}
    label = (
        others[0]
        if len(others) == 1
        else next(i for i in others if header[i].strip().lower() in LABEL_COLUMNS)
    )
    joined = Counter(sign for row in rows for sign in "|;" if sign in row[label])
    if joined and image == 0 and len(others) == 1:
        return "multilabel", {"separator": joined.most_common(1)[0][0]}
    return "csv", {
        "image_key": header[image].strip(),
        "label_key": header[label].strip(),
    }
