"""`kd-train CONFIG --compile-only`: make every graph of the run and write nothing, for `neuron_parallel_compile`."""

from __future__ import annotations

from dataclasses import replace

from kd.artifacts.memory import Memory
from kd.config import Config
from kd.config.schema import Cache
from kd.engine.precompile import precompile
from kd.jobs.check import check
from kd.progress.console import Console
from kd.setup.build import Results, Setting, build_run, distributed
from kd.setup.data import open_data
from kd.setup.recipe import resolve
from kd.setup.teacher import RANDOM, Teachers, load_teachers


def compile_only(settings: Config) -> str:
    """Make a few steps, two evaluations and a checkpoint's gathering of each run that the configuration holds.

    No run folder, no checkpoint, no fitted teacher: one that would be fitted has random weights here, since a graph
    does not depend on them. Data that a dataset renders or unpacks is written.

    Returns:
        What was done, for a person.

    Raises:
        KdError: what `kd-train` would stop at before step 1.
    """
    views = replace(settings.data, views=settings.data.views or settings.teacher.cache.views)
    settings = replace(settings, data=views, teacher=replace(settings.teacher, cache=Cache()))
    recipe, lines = resolve(settings), []
    check(recipe)
    with distributed(recipe.backend) as backend:
        data = open_data(recipe.data, backend, fill=False)
        plan = recipe.teacher
        if plan.section.shard or plan.section.pipeline:
            backend.check_divided(plan.section.pipeline)
        teachers = load_teachers(plan, data, dict.fromkeys(plan.fits, RANDOM))
        alone = Teachers(None, teachers.data)
        runs = [(where, resolve(fit), alone) for where, fit in plan.fits.items()]
        runs.append((recipe.record.name, recipe, teachers))
        if recipe.baseline is not None:
            runs.append((f"{recipe.record.name} (labels only)", resolve(recipe.baseline), alone))
        for title, one, answering in runs:
            results = Results(Memory(), Console(title, quiet=True))
            setting = Setting(answering, backend, one.backend)
            steps = precompile(build_run(one.teacher, one.student, one.loop, setting, results).run)
            counts = {k: v for k, v in backend.counters().items() if k in ("compiles", "executions")}
            counted = ", ".join(f"{name} so far {count:.0f}" for name, count in counts.items())
            lines.append(f"{title}: {steps} steps, 2 evaluations{'; ' if counted else ''}{counted}")
    return "\n".join([*lines, "nothing was kept: no run folder, no checkpoint"])
