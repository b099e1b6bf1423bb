"""Subsets of a source: a test split set aside, `data.exclude`, and limited labels."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from kd.core.contracts import Reducing, Source
from kd.core.errors import DataError, did_you_mean
from kd.core.seeds import seed_from
from kd.core.text import names_of, nfc
from kd.core.types import Decoded, Label

EXCLUDE = "data.exclude"
# methods that a source may have: a subset has those of its source
OPTIONAL = ("stamp", "encoded", "group")


def decoded(
    source: Source, id: int, least: Callable[[int, int], float] | None
) -> Decoded:
    """Decode an image, at reduced size if its source can."""
    return source.decode_reduced(id, least) if reduces(source) else source.decode(id)


def reduces(source: Source) -> TypeGuard[Reducing]:
    """Whether a source's own type defines `decode_reduced`: an override of `decode`
    alone must be respected.
    """
    for one in type(source).__mro__:
        if "decode_reduced" in vars(one):
            return True
        if "decode" in vars(one):
            return False
    return False


class Subset:
    """Images of a source, by position. See `kd.core.contracts.Source`."""

    # which images keep their label, bool [N]; None: all that have one
    known: np.ndarray | None = None

    def __init__(self, source: Any, ids: np.ndarray, *notes: str) -> None:
        """Show the images at positions `ids`, int64 [N]; `notes` are appended to the
        source's warnings.
        """
        self.source, self.ids, self.classes = source, ids, source.classes
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
        return (
            self.source.label(int(self.ids[id]))
            if self.known is None or self.known[id]
            else -1
        )

    def name(self, id: int) -> str:
        return self.source.name(int(self.ids[id]))

    def prepare(self) -> None:
        self.source.prepare()

    def decode(self, id: int) -> Decoded:
        return self.source.decode(int(self.ids[id]))

    def decode_reduced(
        self, id: int, least: Callable[[int, int], float] | None
    ) -> Decoded:
        return decoded(self.source, int(self.ids[id]), least)


def _at(method: Callable[[int], Any], ids: np.ndarray, id: int) -> Any:
    return method(int(ids[id]))


def keep_labels(source: Source, number: int, seed: int, hide: bool) -> Source:
    """Keep the labels of `number` images per class, drawn by seed and name; `hide` the
    others or drop them.
    """
    # The draw depends only on the names in a class, not on their order.
    key, labels = (
        "data.labels_per_class",
        [source.label(id) for id in range(len(source))],
    )
    if labels and isinstance(labels[0], np.ndarray):
        raise DataError(
            key, f"is {number}, but images have several labels", "0", f"Leave {key} out"
        )
    label_N = np.array(labels, np.int64)
    draw_N = np.array(
        [seed_from(seed, "labels", source.name(id)) for id in range(len(source))],
        np.uint64,
    )
    order = np.lexsort((draw_N, label_N))
    kept: list[np.ndarray] = []
    for label, name in enumerate(source.classes):
        drawn = order[label_N[order] == label][:number]
        if len(drawn) < number:
            wrong = (
                f"is {number}, but '{name}' has {len(drawn)} labelled training images"
            )
            raise DataError(
                key, wrong, f"At most {len(drawn)}", "Lower it, or add labels"
            )
        kept.append(drawn)
    ids = np.sort(np.concatenate(kept))
    note = f"{key}: {len(ids)} of {len(source)} training images keep their label"
    labelled = Subset(source, ids, f"{note}, the others are left out")
    if not hide:
        return labelled
    every = np.arange(len(source))
    made = Subset(source, every, note)
    made.known = np.isin(every, ids)
    made.fingerprint = hashlib.sha256(
        b"hidden" + labelled.fingerprint.encode()
    ).hexdigest()
    return made


def set_aside(val: Source, fraction: float) -> tuple[Source, Source]:
    """Split off about `fraction` of the validation images as a test split."""
    # The hash of a name or of its group decides, so images added later do not move
    # others.
    group = getattr(val, "group", val.name)
    draws = np.array(
        [seed_from("test split", group(id)) for id in range(len(val))], np.uint64
    )
    tested = draws < fraction * 2**63
    if tested.all() or not tested.any():
        wrong = (
            f"is {fraction:g}, which leaves one split of {len(val)} validation images"
            " empty"
        )
        raise DataError(
            "data.test_fraction",
            wrong,
            "Some images for each",
            "Change it, or add validation images",
        )
    parts = Subset(val, np.flatnonzero(~tested)), Subset(val, np.flatnonzero(tested))
    known = [
        any(np.max(part.label(id)) >= 0 for id in range(len(part))) for part in parts
    ]
    if any(known) and not all(known):
        split, part = ("validation", parts[0]) if known[1] else ("test", parts[1])
        wrong = (
            f"is {fraction:g}, and none of the {len(part)} images of the {split} split"
            " has a label"
        )
        raise DataError(
            "data.test_fraction",
            wrong,
            "A label in each",
            "Change it, or label more validation images",
        )
    return parts


def without(file: str, splits: Mapping[str, Source]) -> dict[str, Source]:
    """Return the splits without the images listed in a file: lines `NAME`, `SPLIT:NAME`
    or `# comment`.
    """
    # A name that does not fit on a line is written as JSON (`kd.core.text`).
    try:
        content = (
            Path(file)
            .expanduser()
            .read_text(encoding="utf-8", errors="backslashreplace")
        )
    except OSError as error:
        wrong = f"'{file}' cannot be read ({error.strerror})"
        raise DataError(EXCLUDE, wrong, "A text file", "Check the path") from error
    wanted = set(map(nfc, names_of(content)))
    rest, missing = {**splits}, set(wanted)
    for split, source in splits.items():
        out = np.zeros(len(source), bool)
        for id in range(len(source)):
            written = {name := nfc(source.name(id)), f"{split}:{name}"} & wanted
            out[id] = bool(written)
            missing -= written
        if out.all():
            raise DataError(
                EXCLUDE,
                f"'{file}' names all images of the split '{split}'",
                "Some are left",
                "Shorten it",
            )
        if out.any():
            note = (
                f"data.exclude: {out.sum()} of {len(source)} images of the split"
                f" '{split}' are left out"
            )
            rest[split] = Subset(source, np.flatnonzero(~out), note)
    if missing:
        first, more = (
            min(missing),
            (
                f"; {len(missing)} of {len(wanted)} names are missing"
                if len(missing) > 1
                else ""
            ),
        )
        few = sum(map(len, splits.values())) < 10_000
        near = (
            did_you_mean(
                first,
                {one.name(id) for one in splits.values() for id in range(len(one))},
            )
            if few
            else ""
        )
        wrong, remedy = (
            f"'{file}' names '{first}', which is no image{more}",
            near or "Correct the list",
        )
        raise DataError(
            EXCLUDE, wrong, "Names as --check shows them, a line each", remedy
        )
    return rest
