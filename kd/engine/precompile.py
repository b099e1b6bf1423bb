"""Make every graph of a run ahead of it, for compilers that want them first; results are thrown away."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from kd.engine.loop import steps_of, update
from kd.engine.meter import Meter
from kd.engine.run import Run, Stopping
from kd.engine.snapshot import average_buffers
from kd.errors import NonFiniteLoss
from kd.seeds import seed_from
from kd.types import Batch, Plan, State

FEWEST = 3
"""Steps: the first two may be graphs of their own."""


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
    average_buffers(run)
    for _ in range(2):  # the first one asks the teacher too
        run.evaluator(run.distillation.student)
    run.backend.optimizer_state(run.optimizer)
    return state.step


def _steps(run: Run) -> Iterator[tuple[Plan, list[Batch]]]:
    for epoch in itertools.count():
        plan = run.sifter.plan(epoch, 0.0)
        yield from ((plan, micros) for micros in steps_of(run, plan, epoch, 0))
