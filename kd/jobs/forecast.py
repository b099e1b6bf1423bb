"""`kd-train CONFIG --check`: what is checked before a run, damaged and repeated images, and how long the run takes."""

from __future__ import annotations

import os

from kd import instances
from kd.jobs.check import check
from kd.jobs.look import look
from kd.setup.build import distributed
from kd.setup.data import open_sources
from kd.setup.estimate import describe, estimate, measure
from kd.setup.loaders import split_batch
from kd.setup.recipe import Recipe, fit_folders, is_fitted
from kd.text import clock, money


def forecast(recipe: Recipe, path: str = "given", everything: bool = False) -> str:
    """Check a recipe, look for damaged and repeated images, and time a few steps with random weights.

    `everything`: decode and compare all images, not those of five seconds.
    """
    checked, data = check(recipe, path, answers=True), open_sources(recipe.data)
    section = data.section
    lines = [checked, *look(data.splits, section.on_corrupt, recipe.record.path, everything)]
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
