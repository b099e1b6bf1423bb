"""Pictures of a laboratory in a SQLite file: a table `pictures` of (path, dish, photo,
jpeg).
"""

import sqlite3

import numpy as np

from kd.core.facts import DatasetFacts
from kd.core.keys import Keys, ProperFraction, file_key, keys
from kd.parts.datasets import (
    Categorical,
    LabelColumn,
    Names,
    SplitRequest,
    Storage,
    source,
)

facts = DatasetFacts()


@keys
class Options(Keys):
    """The YAML keys of `kind: sqlite`."""

    file: str = file_key()
    """The SQLite file."""
    val_fraction: ProperFraction = 0.1
    """Share of each class held out for validation."""
    group: str = ""
    """What belongs together: a pattern with the group in brackets, searched in the
    path.
    """


class Pictures(Storage):
    config_path = "data.file"

    def __init__(self, file, paths, sizes):
        super().__init__(
            Names(path.encode() for path in paths),
            np.array(sizes),
            np.zeros(len(sizes), np.uint64),
        )
        self.file = file

    def read(self, row):
        with sqlite3.connect(self.file) as database:
            query = "SELECT jpeg FROM pictures WHERE path = ?"
            return database.execute(query, [self.name(row)]).fetchone()[0]


def build(options, split, classes, labels="all"):
    with sqlite3.connect(options.file) as database:
        rows = database.execute(
            "SELECT path, coalesce(dish, ''), length(jpeg) FROM pictures ORDER BY path"
        ).fetchall()
    paths, dishes, sizes = zip(*rows, strict=True)
    request = SplitRequest(
        split, classes, labels, "data.file", options.val_fraction, options.group
    )
    return source(
        Pictures(options.file, paths, sizes),
        LabelColumn(Categorical.from_values(dishes)),
        request,
    )
