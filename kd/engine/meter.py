"""The metrics of a run: kept on the device, summed and logged every few steps."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import Tensor

from kd.engine.run import Run
from kd.engine.snapshot import AFTER_DIVERGING
from kd.errors import NonFiniteLoss
from kd.types import Plan, State


class Meter:
    """Keep a few numbers of each step on the device; `flush` sums them and waits for the device.

    They are not summed as they come: on XLA the first step of a window would then be another graph than the others.
    """

    def __init__(self, run: Run, state: State) -> None:
        self.run, self.since = run, state
        self.rows: list[dict[str, Tensor]] = []
        self.teacher_images = run.teacher.images
        self.clock = time.perf_counter()

    def add(self, values: dict[str, Tensor]) -> None:
        """Keep the means of one step."""
        self.rows.append(values)

    def flush(self, state: State, lr: float) -> State:
        """Log the means since the last flush and return the state with the time spent.

        Raises:
            NonFiniteLoss: naming the term and the window of steps.
        """
        steps = state.step - self.since.step
        if not steps:
            return state
        sums, *rest = self.rows
        for row in rest:
            sums = {name: sums[name] + value for name, value in row.items()}
        stacked = torch.stack([value.float() for value in sums.values()])
        with self.run.span("wait"):
            means = (self.run.backend.reduce_mean(stacked) / steps).tolist()
        values = dict(zip(sums, means, strict=True))
        seconds = time.perf_counter() - self.clock
        self.run.teacher.flush()  # before the terms are judged: it names outputs that are not finite
        broken = [name for name, value in values.items() if not math.isfinite(value)]
        if broken:
            raise NonFiniteLoss(
                "losses" if broken != ["grad_norm"] else "optimizer",
                f"{', '.join(broken)} became NaN or infinite in steps {self.since.step + 1} to {state.step}",
                "All terms must stay finite",
                AFTER_DIVERGING,
            )
        state = replace(state, seconds=state.seconds + seconds)
        values |= {"lr": lr, "images_per_second": (state.images - self.since.images) / seconds}
        values |= {**self.run.backend.counters(), **self.run.window(state)}
        images = self.run.teacher.images
        values["teacher_images"], self.teacher_images = float(images - self.teacher_images), images
        self.run.store.log("train", state, values)
        self.run.logger.log("train", state, values)
        self.since, self.rows = state, []
        return state

    def log_epoch(self, state: State, plan: Plan, steps: int) -> None:
        """Log an epoch's plan: images trained, and how many equally weighted ones they are worth.

        The time is this process's clock; the device is not waited for.
        """
        open_window = time.perf_counter() - self.clock if self.rows else 0.0
        weights_N = plan.weights.double()
        self.run.store.log(
            "epoch",
            replace(state, seconds=state.seconds + open_window),
            {
                "candidates": float(len(plan.ids)),
                "trained": float(steps * self.run.length.batch_size),
                "effective": float(weights_N.sum() ** 2 / (weights_N**2).sum()),
            },
        )

    def resume(self) -> None:
        """Restart the clock where a flush ended the window: evaluation and checkpoints are not training."""
        if not self.rows:
            self.clock, self.teacher_images = time.perf_counter(), self.run.teacher.images
