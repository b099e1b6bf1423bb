"""Decode images before a run; find damaged, repeated and unservable ones."""

import logging
import random
import time
from bisect import bisect
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

from kd.core.contracts import Source
from kd.core.errors import CorruptImage, DataError, NotPrepared
from kd.core.text import quoted
from kd.data.loader import most_skipped
from kd.deploy.serve.decoding import refusal
from kd.deploy.serve.limits import Limits
from kd.files.storage import write_text
from kd.jobs.description import used_bits
from kd.study.audit import lists
from kd.study.audit.copies import Album, copies

LOOK_SECONDS, MOST_LOOKED = 5.0, 100_000  # seconds, and most images, of a sample
PROGRESS_SECONDS, NAMED = 10.0, 3  # seconds between two lines of progress; pairs in the output
DAMAGED, MOST_NAMED = "damaged.txt", 20  # file in `audit`; number of damaged images named on the terminal

log = logging.getLogger("kd")


def scan(
    splits: Mapping[str, Source], max_skipped: float, folder: Path, everything: bool = False, bits: int = 16
) -> list[str]:
    """Decode all images, or a random sample for five seconds; report damaged and repeated ones.

    The share `max_skipped` of a split may be damaged, as in the run; below 0: no image. Damaged images, and pairs in
    two splits or with two labels, are listed in `audit` of the run folder. Nothing is removed.
    """
    (damaged, album, used, refused), audit = _decoded(splits, everything), folder / lists.FOLDER
    total = sum(map(len, splits.values()))
    if not (damaged or len(album)):
        return ["images    not decoded: kd-train makes them"] if everything else []  # not rendered or unpacked yet
    looked = len(damaged) + len(album)
    of = f"{looked} of {total}" if looked < total else f"all {looked}"
    lines = [f"images    decoded {of}: " + (f"{len(damaged)} damaged, to be skipped" if damaged else "none is damaged")]
    lines += used_bits(used, bits)
    if refused:
        reasons = ", ".join(f"{count} {why}" for why, count in refused.most_common())
        lines.append(f"endpoint  kd-serve refuses {refused.total()} of {of} by its default limits: {reasons}")
    if damaged:
        lines += _damaged(damaged, splits, max_skipped, of, audit / DAMAGED)
    found = lists.repeats(album, copies(album), splits)
    leaks, torn = [one for one in found if one.leaks], [one for one in found if not one.leaks]
    exact = sum(one.kind == lists.COPY for one in leaks)
    text = f"{len(leaks)} pairs in two splits ({exact} with the same bytes), {len(torn)} with two labels in one"
    none = f"none among {of}: no photograph is in two splits, or has two labels"
    lines.append(f"repeats   {text if found else none}")
    for one in [*leaks[:NAMED], *torn[:NAMED]]:
        pair = " = ".join(f"{seen.split}:{seen.name}" for seen in (one.one, one.other))
        labels = f", labelled {one.one.label} and {one.other.label}" if one.contradicts else ""
        lines.append(f"          {pair} ({one.kind}, {one.score:.2f}{labels})")
    if looked < total:
        lines.append("          --check=all compares all of them")
    if found:
        earlier = lists.with_ids(lists.read_repeats(audit), splits) if looked < total else []
        lists.write_repeats(audit, lists.worst_first([*earlier, *found]), splits)
        lines.append("          data.group keeps frames of a clip, or pieces of a plate, in one split")
        lines.append(f"          listed in '{audit}', with pictures; data.exclude={audit / lists.EXCLUDE}")
    return lines


def _damaged(
    damaged: Mapping[str, CorruptImage], splits: Mapping[str, Source], max_skipped: float, of: str, file: Path
) -> list[str]:
    """Report damaged images, write them to a file for `data.exclude`, and refuse more than the run may skip."""
    names, first = list(damaged), next(iter(damaged.values()))
    write_text(file, "\n".join(["# Damaged images, for data.exclude.", *map(quoted, names), ""]))
    more = f", ... (all in '{file}')" if len(names) > MOST_NAMED else ""
    listed, remedy = ", ".join(names[:MOST_NAMED]) + more, f"Repair them, or leave them out: data.exclude={file}"
    if max_skipped < 0:
        wrong = (
            first.wrong
            if len(names) == 1
            else f"{len(names)} images among {of} are damaged: {listed}. The first: {first.wrong}"
        )
        raise CorruptImage(first.where, wrong, first.allowed, first.remedy if len(names) == 1 else remedy)
    for split, source in splits.items():
        count, most = sum(name.startswith(f"{split}:") for name in names), most_skipped(max_skipped, len(source))
        if count > most:
            wrong = f"{count} of the {len(source)} images of '{split}' are damaged: {listed}"
            allowed = f"At most {most} (a share of {max_skipped:g}, and always one)"
            raise DataError("data.max_skipped", wrong, allowed, f"{remedy}, or raise data.max_skipped")
    return [f"          {one.wrong}" for one in list(damaged.values())[:MOST_NAMED]] + [f"          listed in '{file}'"]


def _decoded(
    splits: Mapping[str, Source], everything: bool
) -> tuple[dict[str, CorruptImage], Album, Counter[int], Counter[str]]:
    """Decode images; return damaged ones by split and name, counts of used bits, and counts of kd-serve's refusals.

    Empty if the images do not exist yet.
    """
    names, sources, start = [*splits], [*splits.values()], time.monotonic()
    *starts, total = accumulate(map(len, sources), initial=0)
    count = total if everything else min(total, MOST_LOOKED)
    damaged, used, refused, limits = dict[str, CorruptImage](), Counter[int](), Counter[str](), Limits()
    album, logged = Album(count), start
    for position in range(total) if everything else random.Random(0).sample(range(total), count):
        split = bisect(starts, position) - 1
        id = position - starts[split]
        try:
            seen = sources[split].decode(id)
            album.add(split, id, seen)
            used[seen.used] += 1
            if why := refusal(seen, limits):
                refused[why] += 1
        except CorruptImage as error:
            damaged[f"{names[split]}:{sources[split].name(id)}"] = error
        except NotPrepared:
            return {}, Album(0), used, refused
        now = time.monotonic()
        if everything and now > logged + PROGRESS_SECONDS:
            logged = now
            log.info("images    decoded %d of %d, %.0f s", len(album) + len(damaged), total, now - start)
        if not everything and now > start + LOOK_SECONDS:
            break
    return damaged, album, used, refused
