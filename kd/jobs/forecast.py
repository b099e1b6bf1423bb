"""Forecast a run for `kd-train CONFIG --check`: its parts, its time, its images."""

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
    lines, step_mib = description_lines(recipe, path, answers=True)
    data = open_sources(recipe.data)
    max_skipped = data.plan.max_skipped if data.plan.on_corrupt == "skip" else -1.0
    images = scan(data.splits, max_skipped, recipe.path, everything, data.plan.bits)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "\n".join(
            [*lines, *images, "time      not measured: only one process measures"]
        )
    with distributed(recipe.backend) as backend:
        bench = Bench.of(recipe, data, backend)
        timings = measure(bench)
        step_text = lines.pop().removeprefix("memory    ")
        lines.append(_peak_line(step_text, step_mib, bench, timings["step"]))
        return "\n".join(
            [*lines, *images, *estimate(bench, timings), *sifter_lines(bench, timings)]
        )


def _peak_line(step_text: str, step_mib: float, bench: Bench, step: Timing) -> str:
    """Return the line on memory: the process's peak, with that of a step."""
    peak = peak_mib() + LATER_MIB
    if not bench.backend.facts.cpu:
        return (
            f"memory    {peak:.0f} MiB at the peak of the process; of the device"
            f" {step_text}"
        )
    # the timed step may have been smaller than a micro-batch
    peak += step_mib * (1 - step.images / bench.split.micro_batch)
    return f"memory    {peak:.0f} MiB at the peak of the process, including {step_text}"


def sifter_lines(bench: Bench, timings: Mapping[str, Timing]) -> list[str]:
    """Return a line on what a run's sifter saves or costs, from a step's timings."""
    run = bench.plan_run(bench.recipe)
    if not run.sifted:
        return []
    ms = {name: timing.ms for name, timing in timings.items()}
    is_cached = 0 < bench.recipe.teacher.cache.num_views < run.epochs
    teacher_ms = 0.0 if is_cached else bench.teacher_share(run) * ms["teacher"]
    costs = bench.costs(ms, teacher_ms)
    ratio = run.sifter.cost(costs) / costs.per_image()
    return [
        f"sifter    '{bench.recipe.config.sifter.kind}' (teacher {costs.teacher:.2f},"
        f" student forward {costs.forward:.2f}, step {costs.step:.2f}, loading"
        f" {costs.load:.2f} ms per image):"
        f" {sifting_text(ratio, run.epochs - run.sifted, run.sifted)}"
    ]
