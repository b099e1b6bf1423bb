"""Read images with one label each, listed in a table or in a text file of paths.

A table is a CSV or TSV file with columns `path` and `label`. A `.txt` file has one path
per line, and an image's class is its folder. Food-101 as distributed, no file moved:
`root: food-101/images`, `train_list: ../meta/train.txt`, `val_list: ../meta/test.txt`.
"""

import posixpath
from collections.abc import Sequence
from functools import partial
from sys import intern

from kd.core.errors import DataError, did_you_mean
from kd.core.keys import Keys, ProperFraction, file_key, keys
from kd.core.text import nfc
from kd.files.folders import printable
from kd.files.tables import DELIMITERS, require_one_line
from kd.parts.datasets._classes import as_classes
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

FORM = (
    "A CSV or TSV file whose first line names the columns, or a .txt file with a path a"
    " line"
)
facts = partial(dataset_facts, test="test_list")
recognizes = partial(recognize_tables, kind="csv")


@keys
class Options(Keys):
    """Location of images and lists, and the columns to read."""

    root: str = file_key()
    """Folder of the images."""
    train_list: str = file_key(within="root")
    """CSV, TSV or text file of the training images: absolute, or relative to `root`."""
    val_list: str = file_key("", within="root")
    """The same for the validation images. Empty: `val_fraction` of the
    training list.
    """
    test_list: str = file_key("", within="root")
    """The same for the test images, scored once, at the end of a run. Empty: none."""
    val_fraction: ProperFraction = 0.0
    """Share of each class held out for validation, chosen by a hash of the path, if
    there is no `val_list`.
    """
    image_key: str = "path"
    """Column of the images: a path in `root` or an absolute one below it, ending
    optional.
    """
    label_key: str = "label"
    """Column of the labels: class names, or integers."""

    group: str = ""
    """What belongs together, such as the frames of a clip, and stays in one split if kd
    splits by hash: a column, `parent` (the folder), or a pattern with the group in
    brackets, such as '(.*)_', searched in the path. Empty: each image alone.
    """

    def __post_init__(self) -> None:
        Lists(self, "list")
        files = [
            file for file in (self.train_list, self.val_list, self.test_list) if file
        ]
        if len({file.lower().endswith(".txt") for file in files}) > 1:
            raise ValueError(
                f"{', '.join(files)} differ in kind: either all end in .txt, or all are"
                " tables"
            )
        if not self.image_key or not self.label_key or self.image_key == self.label_key:
            raise ValueError("image_key and label_key must name two different columns")


def build(
    options: Options, split: str, classes: Sequence[str] | None, labels: str = "all"
) -> ImageSource:
    """List the images of a split."""
    lists = Lists(options, "list")
    root = find_root(options.root)
    images, notes = lists.locate_images(
        split, partial(_read_list, options=options, labels=labels)
    )
    if options.train_list.lower().endswith(".txt"):
        column = Categorical.from_values(
            printable(posixpath.dirname(path)) for path in images
        )
    else:
        column = Categorical.from_values(
            nfc(image.row.label) for image in images.values()
        )
        column = as_classes(column, "data.label_key")
    return lists.build_source(
        root,
        images,
        LabelColumn(column),
        SplitRequest(split, classes, labels, lists.config_path(split)),
        notes,
    )


def _read_list(
    path: str, config_path: str, options: Options, labels: str
) -> list[ListRow]:
    def parse(content: str) -> list[ListRow]:
        if path.lower().endswith(".txt"):
            lines = enumerate(content.splitlines(), 1)
            return [ListRow(line, "", number) for number, line in lines if line.strip()]
        header, rows = parse_table(content, path)
        keys = ["image_key"] if labels == "none" else ["image_key", "label_key"]
        columns = [
            _column_index(header, getattr(options, key), f"data.{key}", path)
            for key in keys
        ]
        has_group = options.group and options.group in header
        list_rows = list[ListRow]()
        for number, row in rows:
            cells = [row[column] for column in columns]
            require_one_line(number, *cells)
            label = "" if labels == "none" else intern(cells[1].strip())
            group = row[header.index(options.group)] if has_group else ""
            list_rows.append(ListRow(cells[0], label, number, group))
        return list_rows

    return read_list_file(path, config_path, [*DELIMITERS, ".txt"], FORM, parse)


def _column_index(header: Sequence[str], name: str, config_path: str, path: str) -> int:
    if name not in header:
        raise DataError(
            config_path,
            f"'{path}' has no column '{name}'",
            f"Columns: {', '.join(header)}",
            did_you_mean(name, header) or "Set it",
        )
    return header.index(name)
