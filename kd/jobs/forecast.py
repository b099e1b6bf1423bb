"""`kd-train CONFIG --check`: what a run will do, how long it takes, and whether its
images are readable.
"""

import os
from collections.abc import Mapping

from kd.core.host import peak_mib
from kd.jobs.description import description_lines
from kd.jobs.estimate import Bench, estimate, measure
from kd.jobs.scan_images import scan
from kd.jobs.stopwatch import Timing
from kd.setup.build import distributed
from kd.setup.data import open_sources
from kd.setup.recipe import Recipe
from kd.study.sifting import sifting_text

LATER_MIB = 100
"""MiB that evaluation, checkpoints, export and report add to the first steps
(`results/speed/forecast_*.csv`).
"""


def forecast(recipe: Recipe, path: str = "given", everything: bool = False) -> str:
    """Check a recipe, look for damaged images, and time a few steps.

    `everything`: look at all images, and search repeated ones among all of them.
    """
    (lines, counted), data = (
        description_lines(recipe, path, answers=True),
        open_sources(recipe.data),
    )
    most_skipped = data.plan.max_skipped if data.plan.on_corrupt == "skip" else -1.0
    images = scan(data.splits, most_skipped, recipe.path, everything, data.plan.bits)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "\n".join(
            [*lines, *images, "time      not measured: only one process measures"]
        )
    with distributed(recipe.backend) as backend:
        bench = Bench.of(recipe, data, backend)
        parts = measure(bench)
        lines[-1] = _peak_line(
            lines[-1].removeprefix("memory    "), counted, bench, parts["step"]
        )
        return "\n".join(
            [*lines, *images, *estimate(bench, parts), *sifter_lines(bench, parts)]
        )


def _peak_line(of_a_step: str, counted: float, bench: Bench, step: Timing) -> str:
    """Return the line on memory: the process's peak, with a step's own part, `counted`
    MiB of a whole micro-batch.
    """
    peak = peak_mib() + LATER_MIB
    if not bench.backend.facts.cpu:
        return (
            f"memory    {peak:.0f} MiB at the peak of the process; of the device"
            f" {of_a_step}"
        )
    peak += counted * (
        1 - step.images / bench.split.micro_batch
    )  # the timed step may have been smaller
    return f"memory    {peak:.0f} MiB at the peak of the process, including {of_a_step}"


def sifter_lines(bench: Bench, parts: Mapping[str, Timing]) -> list[str]:
    """Return a line on what the sifter of a run saves or costs, from the measured parts
    of a step.
    """
    run = bench.plan_run(bench.recipe)
    if not run.sifted:
        return []
    ms = {name: part.ms for name, part in parts.items()}
    views = bench.recipe.teacher.cache.num_views
    cached = 0 < views < run.epochs
    warm = bench.costs(ms, 0.0 if cached else bench.teacher_share(run) * ms["teacher"])
    measured = (
        f"teacher {warm.teacher:.2f}, student forward {warm.forward:.2f}, step"
        f" {warm.step:.2f}, loading {warm.load:.2f} ms per image"
    )
    kind, ratio = (
        bench.recipe.config.sifter.kind,
        run.sifter.cost(warm) / warm.per_image(),
    )
    return [
        f"sifter    '{kind}' ({measured}):"
        f" {sifting_text(ratio, run.epochs - run.sifted, run.sifted)}"
    ]
