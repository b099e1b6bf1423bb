"""A source is a table: an image per row, with its label and its group.

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
from kd.parts.datasets._columns import Names, Repeated
from kd.parts.datasets._decode import decode
from kd.parts.datasets._splits import grouped, part


class Storage:
    """Images in a storage, a row each. A subclass reads them; it is pickled for
    workers.
    """

    config_path = "data.root"  # config path for errors
    noun = "image"  # an image in errors
    notes: Sequence[str] = ()  # what the listing left out, in lines for the user

    def __init__(self, names: Names, sizes: np.ndarray, stamps: np.ndarray) -> None:
        """Store the listing in order: names, bytes of the files (int64 [N]), and
        `stamp` of each (uint64 [N]).
        """
        self.names, self.sizes, self.stamps = names, sizes, stamps

    def read(self, row: int) -> bytes:
        """Return the bytes of an image file; CorruptImage: no such image, DataError: it
        cannot be read.
        """
        raise NotImplementedError

    def name(self, row: int) -> str:
        """Return a readable name, such as the path below the root."""
        return printable(self.names[row])

    def subject(self, row: int) -> str:
        """Return the image as errors name it."""
        return f"{self.noun} '{self.name(row)}'"

    def keys(self) -> Iterable[bytes]:
        """Return the key of each image whose hash decides whether it is held out for
        validation.

        It is the name in one Unicode form, so that a copy on another file system holds
        out the same images.
        """
        return (
            name if name.isascii() else os.fsencode(nfc(os.fsdecode(name)))
            for name in self.names
        )

    def take(self, rows: np.ndarray) -> Self:
        """Return these rows alone."""
        taken = copy.copy(self)
        taken.names = Names(self.names[row] for row in rows)
        taken.sizes, taken.stamps = self.sizes[rows], self.stamps[rows]
        return taken


class LabelColumn(NamedTuple):
    """The labels of a storage's images."""

    column: Repeated | np.ndarray
    """The class name of each image, "" for none; or its frozenset of class names, None
    for none; or the sets themselves, int8 [N, C], of the classes in `order`.
    """
    order: Sequence[str] | None = (
        # the classes in order, if the storage declares them; None: those that occur
        None
    )
    sets: bool = False  # whether an image has several labels
    subject: Callable[[int], str] | None = (
        None  # names the image of a row in errors, such as a line of a table
    )


class SplitRequest(NamedTuple):
    """What kd wants of a storage; see `kd.core.contracts.Source`."""

    split: str
    classes: Sequence[str] | None
    labels: str  # `data.labels`
    config_path: str  # config path of the split, for errors
    fraction: float = (
        0.0  # share of the list of training images that is held out for validation
    )
    group: str = ""  # `data.group`


def source(
    storage: Storage,
    labels: LabelColumn,
    request: SplitRequest,
    groups: Iterable[str] = (),
) -> Listed:
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
    split, classes, wanted, config_path, fraction, group = request
    column, order, subject = (
        labels.column,
        labels.order,
        labels.subject or storage.subject,
    )
    if not len(storage.sizes):
        wrong = f"the split '{split}' has no images"
        raise DataError(config_path, wrong, "At least one image", "Check the path")
    if wanted == "all" and isinstance(column, Repeated):
        require_labels(column, config_path, subject)
    if wanted == "none":
        order, label = (), np.full(len(storage.sizes), -1, np.int32)
    elif isinstance(column, np.ndarray):
        label = column
        if (
            label.shape != (len(storage.sizes), len(order or ()))
            or label.dtype != np.int8
        ):
            raise TypeError(
                f"sets are int8 [images, classes of `order`], not {label.dtype}"
                f" {[*label.shape]}"
            )
    elif labels.sets:
        order, label = number_sets(column, order, classes, config_path, subject)
    else:
        order, label = number_classes(column, order, classes, config_path, split)
    texts = groups or map(printable, storage.names)
    alike = label if label.ndim == 1 else np.zeros(len(label), np.int64)
    rows, group_of = part(
        storage.keys(), grouped(group, split, texts), alike, fraction, split
    )
    if len(rows) < len(label):
        storage, label = storage.take(rows), label[rows]
    return Listed(storage, label, order or (), group_of)


class Listed:
    """A listing of existing images. See `kd.core.contracts.Source`."""

    bits = 16  # `data.bits`

    def __init__(
        self,
        storage: Storage,
        labels: np.ndarray,
        classes: Sequence[str],
        groups: Repeated | None = None,
    ) -> None:
        """Store the listing in order; labels: one class each, int32 [N], or sets, int8
        [N, C].

        The fingerprint is equal for equal listings on every machine. It has the sizes
        of files and not their times: a copy of the data is the same data.
        """
        self.storage, self.classes, self._labels, self.groups = (
            storage,
            tuple(classes),
            labels,
            groups,
        )
        self.sizes, self.notes = storage.sizes, tuple(storage.notes)
        digest = hashlib.sha256()
        title = "\0".join(classes).encode("utf-8", "surrogatepass")
        arrays = [
            np.ascontiguousarray(labels, "<i4").reshape(-1),
            np.ascontiguousarray(self.sizes, "<i8").reshape(-1),
        ]
        columns: Any = ((array.nbytes, [array.data]) for array in arrays)
        names = storage.names
        for length, pieces in (
            (len(title), [title]),
            (names.size, names.joined()),
            *columns,
        ):
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
        return decode(
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
        return self.groups.texts[self.groups.of[id]] if self.groups else self.name(id)

    def prepare(self) -> None: ...


def stamp(status: os.stat_result) -> int:
    """Return 64 bits that change with a file's times; see
    `kd.core.contracts.Stamped`.
    """
    # A copy may keep mtime, but nothing keeps ctime; some file systems lack it.
    return (status.st_mtime_ns + 3 * status.st_ctime_ns) % 2**64


def facts_of(options: Any, test: str, label: str = "class") -> DatasetFacts:
    """Return the facts of options whose key of the test split is `test`."""
    return DatasetFacts(
        label=label,
        root=getattr(options, "root", ""),
        test=test if getattr(options, test) else "",
    )
