"""`data.exclude`: a source without some of its images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kd.contracts import Source
from kd.data.subset import subset
from kd.errors import DataError, did_you_mean

WHERE = "data.exclude"


def without(file: str, splits: Mapping[str, Source]) -> dict[str, Source]:
    """Return the splits without the images that a file names, a line each: `NAME`, or `SPLIT:NAME`; "#": a remark."""
    try:
        content = Path(file).expanduser().read_text(encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise DataError(
            WHERE, f"'{file}' cannot be read ({error.strerror})", "A text file", "Check the path"
        ) from error
    wanted = {line.strip() for line in content.splitlines() if line.strip() and not line.lstrip().startswith("#")}
    rest, missing = {**splits}, set(wanted)
    for split, source in splits.items():
        out = np.zeros(len(source), bool)
        for id in range(len(source)):
            written = {name := source.name(id), f"{split}:{name}"} & wanted
            out[id] = bool(written)
            missing -= written
        if out.all():
            raise DataError(WHERE, f"'{file}' names all images of the split '{split}'", "Some are left", "Shorten it")
        if out.any():
            note = f"data.exclude: {out.sum()} of {len(source)} images of the split '{split}' are left out"
            rest[split] = subset(source, np.flatnonzero(~out), note)
    if missing:
        first, more = min(missing), f"; {len(missing)} of {len(wanted)} names are none" if len(missing) > 1 else ""
        few = sum(map(len, splits.values())) < 10_000
        near = did_you_mean(first, {one.name(id) for one in splits.values() for id in range(len(one))}) if few else ""
        wrong, allowed = (
            f"'{file}' names '{first}', which is no image{more}",
            "Names as --check shows them, a line each",
        )
        raise DataError(WHERE, wrong, allowed, near or "Correct the list")
    return rest
