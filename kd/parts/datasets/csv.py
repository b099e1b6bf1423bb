"""Images with one label each in a CSV or TSV file with columns `path` and `label`, or
in a text file of paths.

A `.txt` file has one path per line, and an image's class is its folder. Food-101 as
distributed, no file moved: `root: food-101/images`, `train_list: ../meta/train.txt`,
`val_list: ../meta/test.txt`.
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
from kd.parts.datasets._columns import Repeated
from kd.parts.datasets._files import find_root
from kd.parts.datasets._lists import Entry, Lists, content, table
from kd.parts.datasets._recognize import tables
from kd.parts.datasets._source import LabelColumn, Listed, SplitRequest, facts_of

FORM = (
    "A CSV or TSV file whose first line names the columns, or a .txt file with a path a"
    " line"
)
facts = partial(facts_of, test="test_list")
recognizes = partial(tables, kind="csv")


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
        given = [one for one in (self.train_list, self.val_list, self.test_list) if one]
        if len({one.lower().endswith(".txt") for one in given}) > 1:
            raise ValueError(
                f"{', '.join(given)} differ in kind: either all end in .txt, or all are"
                " tables"
            )
        if not self.image_key or not self.label_key or self.image_key == self.label_key:
            raise ValueError("image_key and label_key must name two different columns")


def build(
    options: Options, split: str, classes: Sequence[str] | None, labels: str = "all"
) -> Listed:
    """List the images of a split."""
    lists, root = Lists(options, "list"), find_root(options.root)
    listed, notes = lists.open(split, partial(_read, options=options, labels=labels))
    if options.train_list.lower().endswith(".txt"):
        column = Repeated.of_each(printable(posixpath.dirname(path)) for path in listed)
    else:
        column = Repeated.of_each(nfc(image.entry.label) for image in listed.values())
        column = as_classes(column, "data.label_key")
    return lists.source(
        root,
        listed,
        LabelColumn(column),
        SplitRequest(split, classes, labels, lists.key(split)),
        notes,
    )


def _read(path: str, config_path: str, options: Options, labels: str) -> list[Entry]:
    def read(content: str) -> list[Entry]:
        if path.lower().endswith(".txt"):
            lines = enumerate(content.splitlines(), 1)
            return [Entry(line, "", number) for number, line in lines if line.strip()]
        header, rows = table(content, path)
        keys = ["image_key"] if labels == "none" else ["image_key", "label_key"]
        columns = [
            _column(header, getattr(options, key), f"data.{key}", path) for key in keys
        ]
        image, *label = columns
        group = options.group if options.group in header else ""
        entries = list[Entry]()
        for number, row in rows:
            require_one_line(number, *(row[column] for column in columns))
            name = intern(row[label[0]].strip()) if label else ""
            entries.append(
                Entry(row[image], name, number, group and row[header.index(group)])
            )
        return entries

    return content(path, config_path, [*DELIMITERS, ".txt"], FORM, read)


def _column(header: Sequence[str], name: str, config_path: str, path: str) -> int:
    if name not in header:
        near = did_you_mean(name, header)
        raise DataError(
            config_path,
            f"'{path}' has no column '{name}'",
            f"Columns: {', '.join(header)}",
            near or "Set it",
        )
    return header.index(name)
