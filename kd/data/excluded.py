"""`data.exclude`: a source without some of its images."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kd.contracts import Noted, Source, Stamped
from kd.errors import DataError, did_you_mean
from kd.types import Decoded, Label

WHERE = "data.exclude"


class Excluded:
    """Some images of a source, with ids of their own. See `kd.contracts.Source`, `Stamped` and `Noted`."""

    def __init__(self, source: Source, ids: np.ndarray, note: str) -> None:
        """Keep the images `ids`, int64 [N], ascending."""
        self.source, self.ids, self.classes = source, ids, source.classes
        self.fingerprint = hashlib.sha256(source.fingerprint.encode() + ids.astype("<i8").tobytes()).hexdigest()
        self.notes = (*(source.notes if isinstance(source, Noted) else ()), note)
        if isinstance(source, Stamped):  # else it must have no such method
            self.stamp = self._stamp

    def __len__(self) -> int:
        return len(self.ids)

    def label(self, id: int) -> Label:
        """Return the label of one image."""
        return self.source.label(int(self.ids[id]))

    def name(self, id: int) -> str:
        """Return the source's name of this image."""
        return self.source.name(int(self.ids[id]))

    def prepare(self) -> None:
        """Prepare the source."""
        self.source.prepare()

    def decode(self, id: int) -> Decoded:
        """Return one image; raises as the source does."""
        return self.source.decode(int(self.ids[id]))

    def _stamp(self, id: int) -> int:
        assert isinstance(self.source, Stamped)
        return self.source.stamp(int(self.ids[id]))


def without(file: str, splits: Mapping[str, Source]) -> dict[str, Source]:
    """Return the splits without the images that a file names, a line each: `NAME`, or `SPLIT:NAME`; "#": a remark.

    Raises:
        DataError: it cannot be read, a name is no image, or no image of a split is left.
    """
    try:
        content = Path(file).expanduser().read_text(encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise DataError(
            WHERE, f"'{file}' cannot be read ({error.strerror})", "A text file", "Check the path"
        ) from error
    wanted = {line.strip() for line in content.splitlines() if line.strip() and not line.lstrip().startswith("#")}
    kept, missing, known = {}, set(wanted), set()
    for split, source in splits.items():
        names = [source.name(id) for id in range(len(source))]
        out = np.array([name in wanted or f"{split}:{name}" in wanted for name in names], bool)
        missing -= {*names, *(f"{split}:{name}" for name in names)}
        known.update(names)
        if out.all():
            raise DataError(WHERE, f"'{file}' names all images of the split '{split}'", "Some are left", "Shorten it")
        note = f"data.exclude: {out.sum()} of {len(names)} images of the split '{split}' are left out"
        kept[split] = Excluded(source, np.flatnonzero(~out), note)
    if missing:
        first, more = min(missing), f"; {len(missing)} of {len(wanted)} names are none" if len(missing) > 1 else ""
        near = did_you_mean(first, known) if len(known) < 10_000 else ""
        wrong, allowed = (
            f"'{file}' names '{first}', which is no image{more}",
            "Names as --check shows them, a line each",
        )
        raise DataError(WHERE, wrong, allowed, near or "Correct the list")
    return kept
