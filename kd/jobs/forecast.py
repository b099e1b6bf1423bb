"""`kd-train CONFIG --check`: what is checked before a run, damaged images, and how long the run takes."""

from __future__ import annotations

import os
import random
import time

from kd import instances
from kd.contracts import Source
from kd.errors import CorruptImage, DataError
from kd.jobs.check import check
from kd.setup.build import distributed
from kd.setup.data import open_sources
from kd.setup.estimate import describe, estimate, measure
from kd.setup.loaders import split_batch
from kd.setup.recipe import Recipe, fit_folders, is_fitted
from kd.text import clock, money

LOOK_SECONDS, MOST_LOOKED = 5.0, 100_000
"""How long, and how many images at most, are decoded to find damaged ones."""


def forecast(recipe: Recipe, path: str = "given") -> str:
    """Check a recipe, look for damaged images, and time a few steps with random weights."""
    checked, data = check(recipe, path, answers=True), open_sources(recipe.data)
    section = data.section
    lines = [checked, *_images((data.train, data.val), section.on_corrupt)]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "\n".join([*lines, "time      not measured: only one process measures; kd-plan knows several"])
    split = split_batch(section, 1, len(data.train))
    with distributed(recipe.backend) as backend:
        found = measure(recipe.teacher, recipe.student, data, split, backend, fitting=True)
        fits = sum(not is_fitted(target) for _, target in fit_folders(recipe.teacher, data.fingerprint).values())
        guess = estimate(recipe, data, split, backend, found, fits)
    parts = ", ".join(f"{name} {clock(seconds)}" for name, seconds in guess.seconds.items())
    measured = describe(found) + ("" if found.load else "; loading not measured, the images do not exist yet")
    lines += [
        f"time      about {clock(guess.total)}: {parts}",
        f"speed     {guess.images_per_second:.0f} images/s; {measured}; another load of this machine changes it",
    ]
    hourly = recipe.price.per_hour or getattr(instances.find(recipe.price.instance), "per_hour", 0.0)
    if hourly:
        lines.append(f"cost      about USD {money(hourly * guess.total / 3600)} at USD {hourly:g} an hour")
    return "\n".join(lines)


def _images(splits: tuple[Source, Source], on_corrupt: str) -> list[str]:
    """Decode images in random order, all if the time suffices, and say how many are damaged."""
    train, val = splits
    first_val, total = len(train), len(train) + len(val)
    damaged: list[CorruptImage] = []
    looked, end = 0, time.monotonic() + LOOK_SECONDS
    for id in random.Random(0).sample(range(total), min(total, MOST_LOOKED)):
        try:
            train.decode(id) if id < first_val else val.decode(id - first_val)
        except CorruptImage as error:
            damaged.append(error)
        except DataError:
            return []  # not rendered or unpacked yet
        looked += 1
        if time.monotonic() > end:
            break
    of = f"{looked} of {total}" if looked < total else f"all {looked}"
    if not damaged:
        return [f"images    decoded {of}: none is damaged"]
    first = damaged[0]
    if on_corrupt == "error":
        more = f"; {len(damaged)} damaged images among {of}" if len(damaged) > 1 else ""
        raise CorruptImage(first.where, first.wrong + more, first.allowed, first.remedy)
    return [f"images    decoded {of}: {len(damaged)} damaged, to be skipped; {first.wrong}"]
