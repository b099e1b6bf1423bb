"""`kd-train CONFIG --check`: what is checked before a run, damaged and repeated images, and how long the run takes."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kd.config import instances
from kd.core.contracts import Source
from kd.core.errors import CorruptImage, DataError
from kd.core.text import clock, money, quoted
from kd.data.loader import most_skipped
from kd.files.storage import write_text
from kd.jobs.advice import advise
from kd.jobs.check import check
from kd.jobs.estimate import describe, estimate, measure, random_models
from kd.parts import registry
from kd.setup.build import distributed
from kd.setup.data import open_sources
from kd.setup.loaders import split_batch
from kd.setup.recipe import Recipe, fit_folders, is_fitted
from kd.study.audit.album import Album
from kd.study.audit.copies import copies
from kd.study.audit.lists import (
    COPY,
    EXCLUDE,
    FOLDER,
    Repeat,
    read_repeats,
    repeats,
    with_ids,
    worst_first,
    write_repeats,
)

LOOK_SECONDS, MOST_LOOKED = 5.0, 100_000  # how long, and how many images at most, are decoded where not all are
PROGRESS_SECONDS, NAMED = 10.0, 3  # between two lines of progress; pairs that are named
DAMAGED, MOST_NAMED = "damaged.txt", 20  # in `audit`; of damaged images so many are named on the terminal

log = logging.getLogger("kd")


def forecast(recipe: Recipe, path: str = "given", everything: bool = False) -> str:
    """Check a recipe, look for damaged and repeated images, and time a few steps with random weights.

    `everything`: decode and compare all images, not those of five seconds.
    """
    checked, data = check(recipe, path, answers=True), open_sources(recipe.data)
    section = data.plan
    most = section.max_skipped if section.on_corrupt == "skip" else -1.0
    lines = [checked, *look(data.splits, most, recipe.record.path, everything)]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "\n".join([*lines, "time      not measured: only one process measures"])
    split = split_batch(section, 1, len(data.train))
    facts = registry.facts("backends", recipe.backend.kind, recipe.backend.options, "backend.kind")
    with distributed(recipe.backend) as backend:
        models = random_models(recipe.teacher, recipe.student, data, backend)
        found = measure(recipe.teacher, recipe.student, models, split, backend)
        fits = sum(not is_fitted(target) for _, target in fit_folders(recipe.teacher, data.fingerprint).values())
        guess = estimate(recipe, (len(data.train), len(data.val)), split, backend, found, fits)
        advice = advise(recipe, models, split, backend, facts, found)
    parts = ", ".join(f"{name} {clock(seconds)}" for name, seconds in guess.seconds.items())
    asked = recipe.loop.teacher_images(len(data.train)) * found.teacher / 1000 if recipe.teacher.needed else 0.0
    if asked:
        parts += (
            f"; the teacher takes {100 * min(1.0, asked / guess.seconds['distillation']):.0f} % of the distillation"
        )
    measured = describe(found) + ("" if found.load else "; loading not measured, the images do not exist yet")
    lines += [
        f"time      about {clock(guess.total)}: {parts}",
        f"speed     {guess.images_per_second:.0f} images/s; {measured}; another load of this machine changes it",
    ]
    hourly = recipe.price.per_hour or instances.price_per_hour(recipe.price.instance)
    if hourly:
        lines.append(f"cost      about USD {money(hourly * guess.total / 3600)} at USD {hourly:g} an hour")
    return "\n".join([*lines, *advice])


def look(splits: Mapping[str, Source], max_skipped: float, folder: Path, everything: bool = False) -> list[str]:
    """Decode images, all or for five seconds in random order; say which are damaged, and which repeat.

    Of a split the share `max_skipped` may be damaged, as in the run; below 0: none. Damaged images, and pairs in two
    splits or with two labels, are listed in `audit` of a run folder. Nothing is removed.
    """
    damaged, album = _decoded(splits, everything)
    total = sum(map(len, splits.values()))
    if not (damaged or len(album)):
        return []  # not rendered or unpacked yet
    looked = len(damaged) + len(album)
    of = f"{looked} of {total}" if looked < total else f"all {looked}"
    lines = [f"images    decoded {of}: " + (f"{len(damaged)} damaged, to be skipped" if damaged else "none is damaged")]
    if damaged:
        lines += _damaged(damaged, splits, max_skipped, of, folder / FOLDER / DAMAGED)
    found = repeats(album, copies(album), splits)
    lines += _described(found, of)
    if looked < total:
        lines.append("          --check=all compares all of them")
    if found:
        earlier = with_ids(read_repeats(folder / FOLDER), splits) if looked < total else []
        write_repeats(folder / FOLDER, worst_first([*earlier, *found]), splits)
        lines.append(
            f"          listed in '{folder / FOLDER}', with pictures; data.exclude={folder / FOLDER / EXCLUDE}"
        )
    return lines


def _damaged(
    damaged: Mapping[str, CorruptImage], splits: Mapping[str, Source], max_skipped: float, of: str, file: Path
) -> list[str]:
    """Name the damaged images, all of them in a file for `data.exclude`, and refuse more than the run skips."""
    names, first = list(damaged), next(iter(damaged.values()))
    write_text(file, "\n".join(["# Damaged images, for data.exclude.", *map(quoted, names), ""]))
    more = f", ... (all in '{file}')" if len(names) > MOST_NAMED else ""
    listed, remedy = ", ".join(names[:MOST_NAMED]) + more, f"Repair them, or leave them out: data.exclude={file}"
    if max_skipped < 0:
        wrong = first.wrong if len(names) == 1 else f"{len(names)} images among {of} are damaged: {listed}"
        raise CorruptImage(first.where, wrong, first.allowed, first.remedy if len(names) == 1 else remedy)
    for split, source in splits.items():
        count, most = sum(name.startswith(f"{split}:") for name in names), most_skipped(max_skipped, len(source))
        if count > most:
            wrong = f"{count} of the {len(source)} images of '{split}' are damaged: {listed}"
            allowed = f"At most {most} (a share of {max_skipped:g}, and always one)"
            raise DataError("data.max_skipped", wrong, allowed, f"{remedy}, or raise data.max_skipped")
    return [f"          {one.wrong}" for one in list(damaged.values())[:MOST_NAMED]] + [f"          listed in '{file}'"]


def _decoded(splits: Mapping[str, Source], everything: bool) -> tuple[dict[str, CorruptImage], Album]:
    """Decode images and return the damaged ones by split and name; empty where they do not exist yet."""
    names, sources, starts = [*splits], [*splits.values()], [0]
    for source in sources:
        starts.append(starts[-1] + len(source))
    total, start = starts[-1], time.monotonic()
    count = total if everything else min(total, MOST_LOOKED)
    damaged: dict[str, CorruptImage] = {}
    album, logged = Album(count), start
    for position in range(total) if everything else random.Random(0).sample(range(total), count):
        split = next(i for i in range(len(sources)) if position < starts[i + 1])
        id = position - starts[split]
        try:
            album.add(split, id, sources[split].decode(id))
        except CorruptImage as error:
            damaged[f"{names[split]}:{sources[split].name(id)}"] = error
        except DataError:
            if everything:
                raise
            return {}, Album(0)
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
