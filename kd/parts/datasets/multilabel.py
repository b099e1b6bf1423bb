"""Images with several labels each, or none: a folder of images, and a CSV, TSV or JSON
file that names their labels.

A table with two columns: `file,labels`, the labels joined by `|`. With more:
`file,CLASS,CLASS,...`, each cell 0 or 1. JSON: `{"a.jpg": ["rice", "egg"], "b.jpg":
[]}`. The first line of a table names its columns, whatever the names. With
data.labels=some an image whose cells are empty is unlabelled; of two columns, an empty
cell says "no class" otherwise.
"""

import json
import os
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from glob import escape, glob
from typing import Any

from kd.core.errors import DataError
from kd.core.keys import Keys, ProperFraction, file_key, keys
from kd.core.text import nfc
from kd.files.folders import ENDINGS
from kd.files.tables import DELIMITERS, require_one_line
from kd.parts.datasets._columns import Repeated, first_few
from kd.parts.datasets._files import find_root
from kd.parts.datasets._lists import Entry, Lists, content, table
from kd.parts.datasets._recognize import tables
from kd.parts.datasets._source import LabelColumn, Listed, SplitRequest, facts_of

FORM = "CSV or TSV `file,labels` or `file,CLASS,...` of 0 and 1; JSON {file: [labels]}"
NUMBERS = {"0": False, "1": True, "0.0": False, "1.0": True}
facts = partial(facts_of, test="test_labels", label="set")
recognizes = partial(tables, kind="multilabel")


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
) -> Listed:
    """List the images of a split."""
    lists, root = Lists(options, "labels"), find_root(options.root)
    config_path, columns = lists.key(split), dict[str, list[str]]()
    listed, notes = lists.open(
        split,
        partial(_read, options=options, root=root, columns=columns, labels=labels),
    )
    declared = columns.get(config_path) or None
    if (
        declared
        and labels != "none"
        and (absent := sorted({*(classes or ())} - {*declared}))
    ):
        wrong = f"has no column '{absent[0]}', a class of training"
        wrong += f", and lacks {len(absent) - 1} more" if len(absent) > 1 else ""
        raise DataError(
            config_path,
            wrong,
            f"Columns: {first_few(declared)}",
            "Add it, of 0 where no image shows it",
        )
    column = Repeated.of_each(image.entry.label for image in listed.values())
    request = SplitRequest(split, classes, labels, config_path)
    return lists.source(
        root, listed, LabelColumn(column, declared, sets=True), request, notes
    )


def _read(
    path: str,
    config_path: str,
    options: Options,
    root: str,
    columns: dict[str, list[str]],
    labels: str,
) -> list[Entry]:
    """Return the images of a file with their sets (None: no entry); add the file's
    classes.
    """
    is_json = path.lower().endswith(".json")
    read = (
        _json
        if is_json
        else partial(
            _table, path=path, root=root, separator=options.separator, labels=labels
        )
    )
    columns[config_path], entries = content(
        path, config_path, [*DELIMITERS, ".json"], FORM, read
    )
    return entries


def _table(
    content: str, path: str, root: str, separator: str, labels: str
) -> tuple[list[str], list[Entry]]:
    (first, *written), rows = table(content, path)
    if first and any(
        os.fsencode(name.lower()).endswith(ENDINGS)
        for name in glob(os.path.join(escape(root), escape(first) + ".*"))
    ):
        raise ValueError(
            f"its first line is an image, '{first}'; it must name the columns"
        )
    cells = list[tuple[int, str, list[str]]]()
    for number, (name, *more) in rows:
        require_one_line(number, name, *more)
        cells.append((number, name, [cell.strip() for cell in more]))
    classes = [nfc(name) for name in written]
    if twice := sorted(
        {name for name in classes if classes.count(name) > 1}
    ):  # in two Unicode forms
        raise ValueError(f"its first line names '{twice[0]}' twice")
    if len(classes) > 1:
        return classes, [
            Entry(name, _wide(more, classes, number), number)
            for number, name, more in cells
        ]
    _check_pairs([more[0] for _, _, more in cells], classes[0], separator)
    named = [
        (name, None if labels == "some" and not more[0] else more[0], number)
        for number, name, more in cells
    ]
    return [], [
        Entry(name, None if text is None else _names(text.split(separator)), n)
        for name, text, n in named
    ]


def _wide(
    cells: Sequence[str], classes: Sequence[str], number: int
) -> frozenset[str] | None:
    """Return the labels of a line; None if its cells are empty."""
    if not any(cells):
        return None
    wrong = next((cell for cell in cells if cell not in NUMBERS), None)
    if wrong is not None:
        raise ValueError(f"line {number} has '{wrong}' where 0 or 1 is expected")
    return frozenset(
        name for name, cell in zip(classes, cells, strict=True) if NUMBERS[cell]
    )


def _check_pairs(cells: Collection[str], column: str, separator: str) -> None:
    known = {*cells} - {""}
    if known and known <= NUMBERS.keys():
        raise ValueError(
            f"its column '{column}' holds 0 and 1 alone: a table of one class, which"
            " needs two or more"
        )
    if lists := [cell for cell in sorted(known) if cell[0] + cell[-1] in ("[]", "{}")]:
        raise ValueError(
            f"its cell '{lists[0]}' is a list, not text: write a{separator}b for the"
            " labels a and b"
        )
    if any(separator in cell for cell in known):
        return
    alone = {cell for cell in known if not {";", ",", "|"} & {*cell}}
    for other in sorted({";", ",", "|"} - {separator}):
        joined = next((cell for cell in sorted(known) if other in cell), "")
        # A comma may be part of a name; it is a separator if one of the parts is a
        # label elsewhere.
        if joined and (other != "," or _names(joined.split(other)) & alone):
            raise ValueError(
                f"its labels seem joined by '{other}' ('{joined}'): set"
                f" data.separator='{other}', or write JSON where that is one name"
            )


def _json(content: str) -> tuple[list[str], list[Entry]]:
    found: Any = json.loads(content, object_pairs_hook=_Pairs)
    if not isinstance(found, _Pairs):
        raise ValueError(f"it holds a {type(found).__name__}")
    for name, labels in found:
        if labels is not None and not (
            isinstance(labels, list) and all(isinstance(one, str) for one in labels)
        ):
            raise ValueError(f"'{name}' has no list of names")
    return [], [
        Entry(name, None if labels is None else _names(labels))
        for name, labels in found
    ]


class _Pairs(list[tuple[str, Any]]):
    """A JSON object with repeated keys, of which a dictionary would keep only
    the last.
    """


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(nfc(name.strip()) for name in names) - {""}
