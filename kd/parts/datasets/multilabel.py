"""Read images with several labels each, or none, from a folder and a file of labels.

The file is CSV, TSV or JSON. A table with two columns: `file,labels`, the labels joined
by `|`. With more: `file,CLASS,CLASS,...`, each cell 0 or 1. JSON: `{"a.jpg": ["rice",
"egg"], "b.jpg": []}`. The first line of a table names its columns, whatever the names.
With data.labels=some an image whose cells are empty is unlabelled; of two columns, an
empty cell says "no class" otherwise.
"""

import json
import os
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from glob import escape, glob
from typing import Any

from kd.core.errors import DataError
from kd.core.keys import Keys, ProperFraction, file_key, keys
from kd.core.text import first_few, nfc
from kd.files.folders import ENDINGS
from kd.files.tables import DELIMITERS, require_one_line
from kd.parts.datasets._columns import Categorical
from kd.parts.datasets._files import find_root
from kd.parts.datasets._lists import ListRow, Lists, parse_table, read_list_file
from kd.parts.datasets._recognize import recognize_tables
from kd.parts.datasets._source import (
    ImageSource,
    LabelColumn,
    SplitRequest,
    dataset_facts,
)

FORM = "CSV or TSV `file,labels` or `file,CLASS,...` of 0 and 1; JSON {file: [labels]}"
SEPARATORS = ",;|"  # signs that may join labels
NUMBERS = {"0": False, "1": True, "0.0": False, "1.0": True}
facts = partial(dataset_facts, test="test_labels", label="set")
recognizes = partial(recognize_tables, kind="multilabel")


@keys
class Options(Keys):
    """Location of images and labels."""

    root: str = file_key()
    """Folder of the images."""
    train_labels: str = file_key(within="root")
    """CSV, TSV or JSON file with the labels of the training images: absolute, or
    relative to `root`.
    """
    val_labels: str = file_key("", within="root")
    """The same for the validation images. Empty: `val_fraction` of the
    training file.
    """
    test_labels: str = file_key("", within="root")
    """The same for the test images, scored once, at the end of a run. Empty: none."""
    val_fraction: ProperFraction = 0.0
    """Share of the images held out for validation, chosen by a hash of the path, if
    there is no `val_labels`.
    """
    group: str = ""
    """What belongs together, such as the frames of a clip, and stays in one split if kd
    splits by hash: `parent` (the folder), or a pattern with the group in brackets, such
    as '(.*)_', searched in the path. Empty: each image alone.
    """
    separator: str = "|"
    """Separator of labels in a table of two columns."""

    def __post_init__(self) -> None:
        Lists(self, "labels")
        if not self.separator:
            raise ValueError(
                "separator is empty; it must be what stands between two labels"
            )


def build(
    options: Options, split: str, classes: Sequence[str] | None, labels: str = "all"
) -> ImageSource:
    """List the images of a split."""
    lists = Lists(options, "labels")
    root = find_root(options.root)
    config_path = lists.config_path(split)
    columns: dict[str, list[str]] = {}
    images, notes = lists.locate_images(
        split,
        partial(
            _read_labels, options=options, root=root, columns=columns, labels=labels
        ),
    )
    declared = columns.get(config_path) or None
    if declared and labels != "none":
        absent = sorted({*(classes or ())} - {*declared})
        if absent:
            wrong = f"has no column '{absent[0]}', a class of training"
            if len(absent) > 1:
                wrong += f", and lacks {len(absent) - 1} more"
            raise DataError(
                config_path,
                wrong,
                f"Columns: {first_few(declared)}",
                "Add it, of 0 where no image shows it",
            )
    column = Categorical.from_values(image.row.label for image in images.values())
    request = SplitRequest(split, classes, labels, config_path)
    return lists.build_source(
        root, images, LabelColumn(column, declared, sets=True), request, notes
    )


def _read_labels(
    path: str,
    config_path: str,
    options: Options,
    root: str,
    columns: dict[str, list[str]],
    labels: str,
) -> list[ListRow]:
    """Return a file's images with their sets (None: unlabelled); add its classes."""

    def parse(content: str) -> tuple[list[str], list[ListRow]]:
        if path.lower().endswith(".json"):
            return [], _parse_json(content)
        return _parse_label_table(content, path, root, options.separator, labels)

    columns[config_path], rows = read_list_file(
        path, config_path, [*DELIMITERS, ".json"], FORM, parse
    )
    return rows


def _parse_label_table(
    content: str, path: str, root: str, separator: str, labels: str
) -> tuple[list[str], list[ListRow]]:
    (first, *header), lines = parse_table(content, path)
    if first and any(
        os.fsencode(name.lower()).endswith(ENDINGS)
        for name in glob(os.path.join(escape(root), escape(first) + ".*"))
    ):
        raise ValueError(
            f"its first line is an image, '{first}'; it must name the columns"
        )
    rows = list[tuple[int, str, list[str]]]()
    for number, (name, *cells) in lines:
        require_one_line(number, name, *cells)
        rows.append((number, name, [cell.strip() for cell in cells]))
    classes = [nfc(name) for name in header]
    # in two Unicode forms
    if repeated := sorted({name for name in classes if classes.count(name) > 1}):
        raise ValueError(f"its first line names '{repeated[0]}' twice")
    if len(classes) > 1:
        return classes, [
            ListRow(name, _marked_classes(cells, classes, number), number)
            for number, name, cells in rows
        ]
    _check_cells([cells[0] for _, _, cells in rows], classes[0], separator)
    list_rows = list[ListRow]()
    for number, name, (cell,) in rows:
        unlabelled = labels == "some" and not cell
        label_set = None if unlabelled else _label_set(cell.split(separator))
        list_rows.append(ListRow(name, label_set, number))
    return [], list_rows


def _marked_classes(
    cells: Sequence[str], classes: Sequence[str], number: int
) -> frozenset[str] | None:
    """Return the labels of a line of 0 and 1; None if its cells are empty."""
    if not any(cells):
        return None
    for cell in cells:
        if cell not in NUMBERS:
            raise ValueError(f"line {number} has '{cell}' where 0 or 1 is expected")
    return frozenset(
        name for name, cell in zip(classes, cells, strict=True) if NUMBERS[cell]
    )


def _check_cells(cells: Collection[str], column: str, separator: str) -> None:
    labelled = sorted({*cells} - {""})
    if labelled and {*labelled} <= NUMBERS.keys():
        raise ValueError(
            f"its column '{column}' holds 0 and 1 alone: a table of one class, which"
            " needs two or more"
        )
    if lists := [cell for cell in labelled if cell[0] + cell[-1] in ("[]", "{}")]:
        raise ValueError(
            f"its cell '{lists[0]}' is a list, not text: write a{separator}b for the"
            " labels a and b"
        )
    if any(separator in cell for cell in labelled):
        return
    single_labels = {cell for cell in labelled if not {*SEPARATORS} & {*cell}}
    for sign in SEPARATORS:
        joined = next((cell for cell in labelled if sign in cell), "")
        # A comma may be part of a name; it is a separator if one of the parts is a
        # label elsewhere.
        if joined and (sign != "," or _label_set(joined.split(sign)) & single_labels):
            raise ValueError(
                f"its labels seem joined by '{sign}' ('{joined}'): set"
                f" data.separator='{sign}', or write JSON where that is one name"
            )


def _parse_json(content: str) -> list[ListRow]:
    pairs: Any = json.loads(content, object_pairs_hook=_Pairs)
    if not isinstance(pairs, _Pairs):
        raise ValueError(f"it holds a {type(pairs).__name__}")
    rows = list[ListRow]()
    for name, labels in pairs:
        if labels is None:
            rows.append(ListRow(name, None))
        elif isinstance(labels, list) and all(isinstance(text, str) for text in labels):
            rows.append(ListRow(name, _label_set(labels)))
        else:
            raise ValueError(f"'{name}' has no list of names")
    return rows


class _Pairs(list[tuple[str, Any]]):
    """Hold a JSON object with its repeated keys, as a dictionary would not."""


def _label_set(names: Iterable[str]) -> frozenset[str]:
    return frozenset(nfc(name.strip()) for name in names) - {""}
