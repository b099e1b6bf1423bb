"""`kd-train CONFIG --compile-only`: make every graph of the run and write nothing, for `neuron_parallel_compile`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from kd.config import Config
from kd.config.schema import Cache
from kd.core.errors import NonFiniteLoss
from kd.core.evaluation import Sampled
from kd.core.seeds import seed_from
from kd.core.types import Batch, Plan, State
from kd.engine.loop import steps_of, update
from kd.engine.meter import Meter
from kd.engine.run import Run, Stopping
from kd.engine.snapshot import average_buffers
from kd.files.run_dir import Memory
from kd.jobs.check import check
from kd.jobs.progress.console import Console
from kd.setup.build import Results, Setting, build_run, distributed
from kd.setup.data import open_data
from kd.setup.recipe import resolve
from kd.setup.teacher import RANDOM, Teachers, load_teachers

FEWEST = 3  # steps: the first two may be graphs of their own


def compile_only(settings: Config) -> str:
    """Make a few steps, two evaluations and a checkpoint's gathering of each run that the configuration holds; say so.

    No run folder, no checkpoint, no fitted teacher: one that would be fitted has random weights here, since a graph
    does not depend on them. Data that a dataset renders or unpacks is written.
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


def precompile(run: Run) -> int:
    """Step until the first row of metrics is due, evaluate twice, gather a checkpoint; return the number of steps.

    Numbers are not judged: a compiler that only collects graphs (neuron_parallel_compile) executes nothing, and what
    it returns means nothing.
    """
    length, state = run.length, State()
    steps = max(FEWEST, length.log)
    meter, stop = Meter(run, state), Stopping(run)
    run.distillation.train()
    for plan, micros in itertools.islice(_steps(run), steps):
        run.backend.seed(seed_from(run.seed, "step", state.step, run.backend.rank))
        lr = run.schedule.apply(run.optimizer, state.step / steps)
        meter.add(update(run, micros, state), state, plan)
        run.backend.end_step()
        state = replace(state, step=state.step + 1, images=state.images + length.batch_size)
        stop()
        if state.step % length.log == 0:
            try:
                state = meter.flush(state, lr)
            except NonFiniteLoss:
                meter = Meter(run, state)
    average_buffers(run, state)
    for _ in range(2):  # the first one asks the teacher too
        run.evaluator(run.distillation.student)
    if isinstance(run.evaluator, Sampled):  # as the end of a run asks it
        run.evaluator.samples()
    run.backend.optimizer_state(run.optimizer)
    return state.step


def _steps(run: Run) -> Iterator[tuple[Plan, list[Batch]]]:
    for epoch in itertools.count():
        plan = run.sifter.plan(epoch, 0.0)
        yield from ((plan, micros) for micros in steps_of(run, plan, epoch, 0))
