"""What do the timeline and the monitor cost? The same run with and without them, in turns.

Run: python benchmarks/monitor.py [--steps 200] [--rounds 4]

Two parts. `run`: segments of the engine's loop on one CPU thread, without a listener, with the timeline, and with the
timeline and the monitor's thread; a row is the median step of a segment, in milliseconds. Neighbours move these by more
than the effect. `calls`: the CPU time of what a step adds (its spans and its share of a log window) and of one sample,
which neighbours move little; a row is the share of that step's time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from _record import write
from kd import api
from kd.core.types import State
from kd.engine.loop import steps_of, update
from kd.engine.meter import Meter
from kd.engine.monitor.system import INTERVAL, Monitor, Sampler
from kd.engine.monitor.timeline import Timeline
from kd.engine.run import Run
from kd.files.run_dir import Memory
from kd.jobs.progress.console import Console
from kd.setup.build import Results, distributed

SPANS = ("data", "teacher", "forward", "backward", "sifting", "optimizer")


def build(stack: ExitStack) -> Run:
    """Return a run of a small convolutional network, 5 to 20 ms a step."""
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(256, 3, 32, 32), torch.arange(256) % 10)

    def network(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, width, 5, 2), nn.ReLU(), nn.Conv2d(width, width, 3, 2), nn.Flatten(), nn.LazyLinear(10)
        )

    pair = network(64), network(32)
    for one in pair:
        one(torch.rand(1, 3, 32, 32))
    arguments = api.Arguments([pair[0]], pair[1], data, data, "kl", "none", "all", 0, 0)
    image, length = arguments.image(), {"epochs": 1, "steps": 10**6}
    recipe = arguments.recipe(image, 32, run=length, optimizer={}, backend={"kind": "cpu", "threads": 1})
    world = stack.enter_context(distributed(recipe.backend))
    models = api._models(arguments, image, world)
    return api._run(recipe, arguments, models, Results(Memory(), Console("", quiet=True)), world)


def segment(run: Run, steps: int) -> float:
    """Return the median milliseconds of a step of the loop, log windows of 20 steps included."""
    state, meter, times = State(), Meter(run, State()), []
    while True:
        plan = run.sifter.plan(state.epoch, 0.0)
        begin = time.perf_counter()
        for micros in steps_of(run, plan, state.epoch, 0):
            meter.add(update(run, micros, state), state, plan)
            state = replace(state, step=state.step + 1, images=state.images + 32)
            if state.step % 20 == 0:
                state = meter.flush(state, 0.0)
            times.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            if state.step == steps:
                return 1000 * statistics.median(times)
        state = replace(state, epoch=state.epoch + 1)


def calls(step_ms: float) -> list[dict[str, Any]]:
    """Return the CPU time of what a step and a second add, and their share of a step and of a core's second."""
    with Timeline() as timeline:
        begin = time.thread_time()
        for step in range(1, 5001):
            for name in SPANS:
                with timeline.span(name):
                    pass
            if step % 20 == 0:
                timeline.window(State(step=step))
        spans = (time.thread_time() - begin) / 5000
    sampler = Sampler()
    begin = time.thread_time()
    for _ in range(200):
        sampler.sample()
    sample = (time.thread_time() - begin) / 200
    sampler.close()
    found = {"timeline": (1000 * spans, 1000 * spans / step_ms), "sample": (1000 * sample, sample / INTERVAL)}
    return [
        {"part": "calls", "which": which, "round": 0, "ms": round(ms, 4), "share": round(share, 6)}
        for which, (ms, share) in found.items()
    ]


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        run = build(stack)
        run.distillation.train()
        torch.set_num_threads(1)
        segment(run, 20)
        names = ("none", "timeline", "timeline+monitor")
        for number in range(given.rounds):
            for name in names if number % 2 else reversed(names):
                timeline = Timeline() if name != "none" else None
                watched = replace(run, span=timeline.span, window=timeline.window) if timeline is not None else run
                with (
                    timeline or nullcontext(),
                    Monitor(Path(stack.enter_context(TemporaryDirectory())) / "m")
                    if name.endswith("monitor")
                    else nullcontext(),
                ):
                    ms = segment(watched, given.steps)
                rows.append({"part": "run", "which": name, "round": number, "ms": round(ms, 4), "share": ""})
    plain = statistics.median(row["ms"] for row in rows if row["which"] == "none")
    for name in names[1:]:
        ratios = [
            row["ms"] / next(r["ms"] for r in rows if (r["which"], r["round"]) == ("none", row["round"]))
            for row in rows
            if row["which"] == name
        ]
        median = statistics.median(ratios)
        print(f"{name}: median of paired ratios {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    for row in calls(plain):
        rows.append(row)
        what = f"of a step of {plain:.1f} ms" if row["which"] == "timeline" else "of a core"
        print(f"{row['which']}: {row['ms']:.3f} ms, {100 * row['share']:.2f} % {what}")
    write("monitor", " ".join(["python benchmarks/monitor.py", *sys.argv[1:]]), rows)


if __name__ == "__main__":
    main()
