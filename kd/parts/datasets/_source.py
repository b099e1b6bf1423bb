"""Build a source, which is a table of an image per row, with its label and its group.

A storage (a folder, a table file, shards, rows of a data set) lists its images and
reads one; what is the same for all is here: labels to numbers, validation images held
out, groups, the fingerprint of the listing, decoding.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import Self

from kd.core.errors import DataError
from kd.core.facts import DatasetFacts
from kd.core.text import nfc
from kd.core.types import Decoded, Label
from kd.files.folders import printable
from kd.files.pixels import Least
from kd.parts.datasets._classes import number_classes, number_sets, require_labels
from kd.parts.datasets._columns import Categorical, Names
from kd.parts.datasets._decode import decode_image
from kd.parts.datasets._splits import find_groups, split_rows


class Storage:
    """List the images of a storage, a row each; a subclass reads them.

    It is pickled for workers.
    """

    config_path = "data.root"  # config path for errors
    noun = "image"  # an image in errors
    notes: Sequence[str] = ()  # what the listing left out, in lines for the user

    def __init__(self, names: Names, sizes: np.ndarray, stamps: np.ndarray) -> None:
        """Store the listing in order.

        Args:
            names: of the images.
            sizes: bytes of the files, int64 [N].
            stamps: `file_stamp` of each, uint64 [N].
        """
        self.names = names
        self.sizes = sizes
        self.stamps = stamps

    def read(self, row: int) -> bytes:
        """Return the bytes of an image file.

        Raises:
            CorruptImage: there is no such image.
            DataError: it cannot be read.
        """
        raise NotImplementedError

    def name(self, row: int) -> str:
        """Return a readable name, such as the path below the root."""
        return printable(self.names[row])

    def subject(self, row: int) -> str:
        """Return the image as errors name it."""
        return f"{self.noun} '{self.name(row)}'"

    def keys(self) -> Iterable[bytes]:
        """Return each image's key, whose hash decides whether it is held out.

        It is the name in one Unicode form, so that a copy on another file system holds
        out the same images.
        """
        return (
            name if name.isascii() else os.fsencode(nfc(os.fsdecode(name)))
            for name in self.names
        )

    def take(self, rows: np.ndarray) -> Self:
        """Return these rows alone."""
        subset = copy.copy(self)
        subset.names = Names(self.names[row] for row in rows)
        subset.sizes = self.sizes[rows]
        subset.stamps = self.stamps[rows]
        return subset


class LabelColumn(NamedTuple):
    """Hold the labels of a storage's images."""

    column: Categorical | np.ndarray
    """The class name of each image, "" for none; or its frozenset of class names, None
    for none; or the sets themselves, int8 [N, C], of the classes in `order`.
    """
    # the classes in order, if the storage declares them; None: those that occur
    order: Sequence[str] | None = None
    sets: bool = False  # whether an image has several labels
    # names the image of a row in errors, such as a line of a table
    subject: Callable[[int], str] | None = None


class SplitRequest(NamedTuple):
    """Say what kd wants of a storage; see `kd.core.contracts.Source`."""

    split: str
    classes: Sequence[str] | None
    labels: str  # `data.labels`
    config_path: str  # config path of the split, for errors
    # share of the list of training images that is held out for validation
    fraction: float = 0.0
    group: str = ""  # `data.group`


def source(
    storage: Storage,
    labels: LabelColumn,
    request: SplitRequest,
    groups: Iterable[str] = (),
) -> ImageSource:
    """Return the images of a split with their labels.

    Args:
        storage: the images of the split, or those that training and validation share.
        labels: their labels; not read if the request wants none.
        request: the split and its settings.
        groups: a text of each image in which `data.group` is searched; its name by
            default.

    Raises:
        DataError: no image, no label, a class that training does not have, a group that
            groups nothing.
    """
    split, classes, labels_needed, config_path, fraction, group_rule = request
    column = labels.column
    order = labels.order
    subject = labels.subject or storage.subject
    count = len(storage.sizes)
    if not count:
        wrong = f"the split '{split}' has no images"
        raise DataError(config_path, wrong, "At least one image", "Check the path")
    if labels_needed == "all" and isinstance(column, Categorical):
        require_labels(column, config_path, subject)
    if labels_needed == "none":
        order = ()
        numbers = np.full(count, -1, np.int32)
    elif isinstance(column, np.ndarray):
        numbers = column
        if numbers.shape != (count, len(order or ())) or numbers.dtype != np.int8:
            raise TypeError(
                f"sets are int8 [images, classes of `order`], not {numbers.dtype}"
                f" {[*numbers.shape]}"
            )
    elif labels.sets:
        order, numbers = number_sets(column, order, classes, config_path, subject)
    else:
        order, numbers = number_classes(column, order, classes, config_path, split)
    texts = groups or map(printable, storage.names)
    group_column = find_groups(group_rule, split, texts)
    # Images with label sets are held out like those of one class.
    strata = numbers if numbers.ndim == 1 else np.zeros(len(numbers), np.int64)
    rows, group_column = split_rows(
        storage.keys(), group_column, strata, fraction, split
    )
    if len(rows) < len(numbers):
        storage = storage.take(rows)
        numbers = numbers[rows]
    return ImageSource(storage, numbers, order or (), group_column)


class ImageSource:
    """Read listed images. See `kd.core.contracts.Source`."""

    bits = 16  # `data.bits`

    def __init__(
        self,
        storage: Storage,
        labels: np.ndarray,
        classes: Sequence[str],
        groups: Categorical | None = None,
    ) -> None:
        """Store the listing in order, and its fingerprint.

        `labels`: one class each, int32 [N], or sets, int8 [N, C].

        The fingerprint is equal for equal listings on every machine. It has the sizes
        of files and not their times: a copy of the data is the same data.
        """
        self.storage = storage
        self.classes = tuple(classes)
        self._labels = labels
        self.groups = groups
        self.sizes = storage.sizes
        self.notes = tuple(storage.notes)
        digest = hashlib.sha256()
        title = "\0".join(classes).encode("utf-8", "surrogatepass")
        names = storage.names
        columns: list[tuple[int, Iterable[Any]]] = [
            (len(title), [title]),
            (names.size, names.joined_pieces()),
        ]
        for numbers, dtype in ((labels, "<i4"), (self.sizes, "<i8")):
            array = np.ascontiguousarray(numbers, dtype).reshape(-1)
            columns.append((array.nbytes, [array.data]))
        for length, pieces in columns:
            digest.update(length.to_bytes(8, "little"))
            for piece in pieces:
                digest.update(piece)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._labels)

    def label(self, id: int) -> Label:
        return int(self._labels[id]) if self._labels.ndim == 1 else self._labels[id]

    def stamp(self, id: int) -> int:
        return int(self.storage.stamps[id])

    def decode(self, id: int) -> Decoded:
        return self.decode_reduced(id, None)

    def decode_reduced(self, id: int, least: Least | None) -> Decoded:
        return decode_image(
            self.encoded(id),
            self.storage.subject(id),
            self.storage.config_path,
            least,
            self.bits,
        )

    def encoded(self, id: int) -> bytes:
        return self.storage.read(id)

    def name(self, id: int) -> str:
        return self.storage.name(id)

    def group(self, id: int) -> str:
        if self.groups is None:
            return self.name(id)
        return self.groups.categories[self.groups.codes[id]]

    def prepare(self) -> None: ...


def file_stamp(status: os.stat_result) -> int:
    """Return 64 bits that change with a file's times; see `contracts.Stamped`."""
    # A copy may keep mtime, but nothing keeps ctime; some file systems lack it.
    return (status.st_mtime_ns + 3 * status.st_ctime_ns) % 2**64


def dataset_facts(options: Any, test: str, label: str = "class") -> DatasetFacts:
    """Return the facts of options whose key of the test split is `test`."""
    return DatasetFacts(
        label=label,
        root=getattr(options, "root", ""),
        test=test if getattr(options, test) else "",
    )
