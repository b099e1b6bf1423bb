"""What `kd-train --check` sees by decoding images: damaged ones, and such that repeat."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kd.audit.album import Album
from kd.audit.copies import copies
from kd.audit.lists import COPY, EXCLUDE, FOLDER, Repeat, present, read_repeats, repeats, worst_first, write_repeats
from kd.contracts import Source
from kd.errors import CorruptImage, DataError

LOOK_SECONDS, MOST_LOOKED = 5.0, 100_000  # how long, and how many images at most, are decoded where not all are
PROGRESS_SECONDS, NAMED = 10.0, 3  # between two lines of progress; pairs that are named

log = logging.getLogger("kd")


def look(splits: Mapping[str, Source], on_corrupt: str, folder: Path, everything: bool = False) -> list[str]:
    """Decode images, all or for five seconds in random order; say which are damaged, and which repeat.

    Pairs in two splits, or with two labels, are listed in `audit` of a run folder. Nothing is removed.
    """
    damaged, album = _decoded(splits, everything)
    total = sum(map(len, splits.values()))
    if not (damaged or len(album)):
        return []  # not rendered or unpacked yet
    looked = len(damaged) + len(album)
    of = f"{looked} of {total}" if looked < total else f"all {looked}"
    text = "none is damaged"
    if damaged:
        first = damaged[0]
        if on_corrupt == "error":
            more = f"; {len(damaged)} damaged images among {of}" if len(damaged) > 1 else ""
            raise CorruptImage(first.where, first.wrong + more, first.allowed, first.remedy)
        text = f"{len(damaged)} damaged, to be skipped; {first.wrong}"
    found = repeats(album, copies(album), splits)
    lines = [f"images    decoded {of}: {text}", *_described(found, of)]
    if looked < total:
        lines.append("          --check=all compares all of them")
    if found:
        earlier = present(read_repeats(folder / FOLDER), splits) if looked < total else []
        write_repeats(folder / FOLDER, worst_first([*earlier, *found]), splits)
        lines.append(
            f"          listed in '{folder / FOLDER}', with pictures; data.exclude={folder / FOLDER / EXCLUDE}"
        )
    return lines


def _decoded(splits: Mapping[str, Source], everything: bool) -> tuple[list[CorruptImage], Album]:
    """Decode images; empty where they do not exist yet."""
    sources, starts = [*splits.values()], [0]
    for source in sources:
        starts.append(starts[-1] + len(source))
    total, start = starts[-1], time.monotonic()
    count = total if everything else min(total, MOST_LOOKED)
    damaged: list[CorruptImage] = []
    album, logged = Album(count), start
    for position in range(total) if everything else random.Random(0).sample(range(total), count):
        split = next(i for i in range(len(sources)) if position < starts[i + 1])
        id = position - starts[split]
        try:
            album.add(split, id, sources[split].decode(id))
        except CorruptImage as error:
            damaged.append(error)
        except DataError:
            if everything:
                raise
            return [], Album(0)
        now = time.monotonic()
        if everything and now > logged + PROGRESS_SECONDS:
            logged = now
            log.info("images    decoded %d of %d, %.0f s", len(album) + len(damaged), total, now - start)
        if not everything and now > start + LOOK_SECONDS:
            break
    return damaged, album


def _described(found: Sequence[Repeat], of: str) -> list[str]:
    leaks, torn = [one for one in found if one.leaks], [one for one in found if not one.leaks]
    if not found:
        return [f"repeats   none among {of}: no photograph is in two splits, or has two labels"]
    exact = sum(one.kind == COPY for one in leaks)
    lines = [
        f"repeats   {len(leaks)} pairs in two splits ({exact} with the same bytes), {len(torn)} with two labels in one"
    ]
    for one in [*leaks[:NAMED], *torn[:NAMED]]:
        pair = " = ".join(f"{seen.split}:{seen.name}" for seen in (one.one, one.other))
        labels = f", labelled {one.one.label} and {one.other.label}" if one.contradicts else ""
        lines.append(f"          {pair} ({one.kind}, {one.score:.2f}{labels})")
    return lines
