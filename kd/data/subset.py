"""A subset of a source shows some images, or hides labels."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from kd.core.contracts import Reducing, Source
from kd.core.errors import DataError, did_you_mean
from kd.core.seeds import seed_from
from kd.core.text import names_in_list, nfc
from kd.core.types import Decoded, Label

EXCLUDE = "data.exclude"
# methods that a source may have: a subset has those of its source
OPTIONAL = ("stamp", "encoded", "group")


def decode_image(
    source: Source, id: int, least: Callable[[int, int], float] | None
) -> Decoded:
    """Decode an image, at reduced size if its source can."""
    return source.decode_reduced(id, least) if can_reduce(source) else source.decode(id)


def can_reduce(source: Source) -> TypeGuard[Reducing]:
    """Return whether a source's own type defines `decode_reduced`.

    An override of `decode` alone must be respected.
    """
    for cls in type(source).__mro__:
        if "decode_reduced" in vars(cls):
            return True
        if "decode" in vars(cls):
            return False
    return False


class Subset:
    """A subset has some images of a source, by position.

    See `kd.core.contracts.Source`.
    """

    # which images keep their label, bool [N]; None: all that have one
    has_label: np.ndarray | None = None

    def __init__(self, source: Any, ids: np.ndarray, *notes: str) -> None:
        """Show the images at positions `ids`, int64 [N].

        `notes` are appended to the source's warnings.
        """
        self.source = source
        self.ids = ids
        self.classes = source.classes
        content = source.fingerprint.encode() + ids.astype("<i8").tobytes()
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self.notes: Sequence[str] = (*getattr(source, "notes", ()), *notes)
        if hasattr(source, "sizes"):
            self.sizes = source.sizes[ids]
        for name in OPTIONAL:
            if hasattr(source, name):
                setattr(self, name, partial(_at, getattr(source, name), ids))

    def __len__(self) -> int:
        return len(self.ids)

    def label(self, id: int) -> Label:
        if self.has_label is not None and not self.has_label[id]:
            return -1
        return self.source.label(int(self.ids[id]))

    def name(self, id: int) -> str:
        return self.source.name(int(self.ids[id]))

    def prepare(self) -> None:
        self.source.prepare()

    def decode(self, id: int) -> Decoded:
        return self.source.decode(int(self.ids[id]))

    def decode_reduced(
        self, id: int, least: Callable[[int, int], float] | None
    ) -> Decoded:
        return decode_image(self.source, int(self.ids[id]), least)


def _at(method: Callable[[int], Any], ids: np.ndarray, id: int) -> Any:
    return method(int(ids[id]))


def keep_labels(source: Source, number: int, seed: int, hide: bool) -> Source:
    """Keep the labels of `number` images per class, drawn by seed and name.

    `hide` the others' labels, or drop the images.
    """
    # The draw depends only on the names in a class, not on their order.
    key = "data.labels_per_class"
    labels = [source.label(id) for id in range(len(source))]
    if labels and isinstance(labels[0], np.ndarray):
        wrong = f"is {number}, but images have several labels"
        raise DataError(key, wrong, "0", f"Leave {key} out")
    label_N = np.array(labels, np.int64)
    draws = [seed_from(seed, "labels", source.name(id)) for id in range(len(source))]
    draw_N = np.array(draws, np.uint64)
    order = np.lexsort((draw_N, label_N))
    labelled_ids: list[np.ndarray] = []
    for label, name in enumerate(source.classes):
        drawn = order[label_N[order] == label][:number]
        if len(drawn) < number:
            wrong = (
                f"is {number}, but '{name}' has {len(drawn)} labelled training images"
            )
            allowed = f"At most {len(drawn)}"
            raise DataError(key, wrong, allowed, "Lower it, or add labels")
        labelled_ids.append(drawn)
    ids = np.sort(np.concatenate(labelled_ids))
    note = f"{key}: {len(ids)} of {len(source)} training images keep their label"
    labelled = Subset(source, ids, f"{note}, the others are left out")
    if not hide:
        return labelled
    every = np.arange(len(source))
    hidden = Subset(source, every, note)
    hidden.has_label = np.isin(every, ids)
    content = b"hidden" + labelled.fingerprint.encode()
    hidden.fingerprint = hashlib.sha256(content).hexdigest()
    return hidden


def set_aside(val: Source, fraction: float) -> tuple[Source, Source]:
    """Split off about `fraction` of the validation images as a test split."""
    # The hash of a name or of its group decides, so images added later do not move
    # others.
    group = getattr(val, "group", val.name)
    key = "data.test_fraction"
    draws = np.array(
        [seed_from("test split", group(id)) for id in range(len(val))], np.uint64
    )
    tested = draws < fraction * 2**63
    if tested.all() or not tested.any():
        wrong = (
            f"is {fraction:g}, which leaves one split of {len(val)} validation images"
            " empty"
        )
        remedy = "Change it, or add validation images"
        raise DataError(key, wrong, "Some images for each", remedy)
    validation = Subset(val, np.flatnonzero(~tested))
    test = Subset(val, np.flatnonzero(tested))
    unlabelled = [
        (name, split)
        for name, split in (("validation", validation), ("test", test))
        if not any(np.max(split.label(id)) >= 0 for id in range(len(split)))
    ]
    if len(unlabelled) == 1:
        [(name, split)] = unlabelled
        wrong = (
            f"is {fraction:g}, and none of the {len(split)} images of the {name} split"
            " has a label"
        )
        remedy = "Change it, or label more validation images"
        raise DataError(key, wrong, "A label in each", remedy)
    return validation, test


def exclude_images(file: str, splits: Mapping[str, Source]) -> dict[str, Source]:
    """Return the splits without the images listed in a file.

    Its lines are `NAME`, `SPLIT:NAME` or `# comment`.
    """
    # A name that does not fit on a line is written as JSON (`kd.core.text`).
    path = Path(file).expanduser()
    try:
        content = path.read_text(encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        wrong = f"'{file}' cannot be read ({error.strerror})"
        raise DataError(EXCLUDE, wrong, "A text file", "Check the path") from error
    listed = set(map(nfc, names_in_list(content)))
    missing = set(listed)
    remaining = dict(splits)
    for split, source in splits.items():
        excluded = np.zeros(len(source), bool)
        for id in range(len(source)):
            name = nfc(source.name(id))
            matches = {name, f"{split}:{name}"} & listed
            excluded[id] = bool(matches)
            missing -= matches
        if excluded.all():
            wrong = f"'{file}' names all images of the split '{split}'"
            raise DataError(EXCLUDE, wrong, "Some are left", "Shorten it")
        if excluded.any():
            note = (
                f"data.exclude: {excluded.sum()} of {len(source)} images of the split"
                f" '{split}' are left out"
            )
            remaining[split] = Subset(source, np.flatnonzero(~excluded), note)
    if missing:
        raise _no_image(file, missing, listed, splits)
    return remaining


def _no_image(
    file: str, missing: set[str], listed: set[str], splits: Mapping[str, Source]
) -> DataError:
    first = min(missing)
    wrong = f"'{file}' names '{first}', which is no image"
    if len(missing) > 1:
        wrong += f"; {len(missing)} of {len(listed)} names are missing"
    remedy = ""
    if sum(map(len, splits.values())) < 10_000:
        names = {
            source.name(id) for source in splits.values() for id in range(len(source))
        }
        remedy = did_you_mean(first, names)
    allowed = "Names as --check shows them, a line each"
    return DataError(EXCLUDE, wrong, allowed, remedy or "Correct the list")
