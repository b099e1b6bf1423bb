"""3. ENGINE. The loop: read `train` top to bottom, it is the whole program."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from kd.engine.run import Run
from kd.engine.scoring import Scoring
from kd.engine.snapshot import AFTER_DIVERGING, agree, restore, snapshot
from kd.errors import NonFiniteLoss
from kd.seeds import seed_from
from kd.types import Batch, Plan, State


def train(run: Run) -> State:
    """Distil the teacher into the student and return how far the run came.

    Everything random in a step is seeded by (seed, step, rank), the data by (seed, view, id), the order by
    (seed, epoch): a run that is killed and resumed is the run that was not.

    Raises:
        NonFiniteLoss: a term became NaN or infinite; nothing of it was checkpointed.
    """
    length, backend = run.length, run.backend
    state = restore(run)
    meter = Meter(run, state)
    run.distillation.train()
    while not length.finished(state):
        plan = run.sifter.plan(state.epoch, length.share(state))
        steps_in_epoch = plan.steps or len(plan.ids) // length.batch_size
        for micros in steps_of(run, plan, state.epoch, state.step_in_epoch):
            backend.seed(seed_from(run.seed, "step", state.step, backend.rank))
            progress = length.progress(state, steps_in_epoch)
            lr = run.schedule.apply(run.optimizer, progress)
            meter.add(update(run, micros, state))
            backend.end_step()
            state = advance(state, length.batch_size, steps_in_epoch)
            run.watcher.step(state, progress)
            last = length.finished(state)
            evaluating = due(length.evaluate, state) or last
            checkpointing = (due(length.checkpoint, state) if length.checkpoint else evaluating) or last
            if due(length.log, state) or evaluating or checkpointing:
                state = meter.flush(state, lr)
            if state.step_in_epoch == 0:
                log_epoch(run, meter.clocked(state), plan, steps_in_epoch)
            improved = False
            if evaluating or checkpointing:
                agree(run)
            if evaluating:
                state, improved = evaluate(run, state)
            if checkpointing or improved:
                snapshot(run, state, improved)
            meter.resume()
            if last:
                break
    return state


def steps_of(run: Run, plan: Plan, epoch: int, start: int) -> Iterator[list[Batch]]:
    """Return the micro-batches of each step of an epoch from step `start` on: loaded, looked up, sent, sifted."""
    loaded = run.loader.epoch(plan, run.length.view(epoch), start=run.sifter.first(start))
    sent = run.backend.put(run.teacher.lookup(loaded))
    return grouped(run.sifter.stream(sent, Scoring(run), start), run.length.accumulate)


def update(run: Run, micros: list[Batch], state: State) -> dict[str, Tensor]:
    """Make one optimizer step over the micro-batches; return means over this rank's images, still on the device."""
    sums: dict[str, Tensor] = {}
    for i, batch in enumerate(micros):
        teacher = run.teacher(batch)  # first, so that no student activations are alive beside it
        more = i + 1 < len(micros)
        with run.backend.no_sync(run.module) if more else nullcontext():
            with run.backend.autocast():
                logits_BC, scores = run.module(batch, teacher)
            (scores["loss"].mean() / len(micros)).backward()
        run.sifter.observe(batch.ids, scores.pop("per_image"))
        scores["accuracy"] = (logits_BC.argmax(-1) == batch.label).float()
        for name, score_B in scores.items():
            mean = score_B.detach().mean() / len(micros)
            sums[name] = sums[name] + mean if name in sums else mean
    sums["grad_norm"] = run.backend.step(run.optimizer, run.max_norm)
    if run.average is not None:
        run.average.update(state.step + 1)
    return sums


def evaluate(run: Run, state: State) -> tuple[State, bool]:
    """Evaluate the student (its averaged weights where there are any); return whether it is the best so far."""
    with run.average.applied() if run.average is not None else nullcontext():
        values = run.evaluator(run.distillation.student)
    improved = values["accuracy"] > state.best
    state = replace(state, best=max(state.best, values["accuracy"]))
    run.sink.log("val", state, values)
    run.watcher.log("val", state, values)
    return state, improved


def log_epoch(run: Run, state: State, plan: Plan, steps: int) -> None:
    """Log what an epoch's plan was: images trained, and how many equally weighted ones they are worth."""
    weights_N = plan.weights.double()
    run.sink.log(
        "epoch",
        state,
        {
            "candidates": float(len(plan.ids)),
            "trained": float(steps * run.length.batch_size),
            "effective": float(weights_N.sum() ** 2 / (weights_N**2).sum()),
        },
    )


def advance(state: State, images: int, steps_in_epoch: int) -> State:
    """Return the state after one more step."""
    done = state.step_in_epoch + 1
    turn = done >= steps_in_epoch
    return replace(
        state,
        step=state.step + 1,
        images=state.images + images,
        epoch=state.epoch + turn,
        step_in_epoch=0 if turn else done,
    )


def due(every: int, state: State) -> bool:
    """Return whether something that happens every `every` steps is due; 0: at the end of each epoch."""
    return state.step % every == 0 if every else state.step_in_epoch == 0


def grouped(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield `size` micro-batches at a time; an unfinished group at the end is dropped."""
    while len(group := list(itertools.islice(batches, size))) == size:
        yield group


class Meter:
    """Keeps metrics on the device, a few numbers a step; `flush`, which sums them, is the only wait for it.

    Not summed as they come: on XLA that would make the first step of a window another graph than the others.
    """

    def __init__(self, run: Run, state: State) -> None:
        self.run, self.since = run, state
        self.rows: list[dict[str, Tensor]] = []
        self.taught = run.teacher.images
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
        means = (self.run.backend.reduce_mean(stacked) / steps).tolist()
        values = dict(zip(sums, means, strict=True))
        seconds = time.perf_counter() - self.clock
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
        values |= self.run.backend.counters()
        self.run.teacher.flush()
        images = self.run.teacher.images
        values["teacher_images"], self.taught = float(images - self.taught), images
        self.run.sink.log("train", state, values)
        self.run.watcher.log("train", state, values)
        self.since, self.rows = state, []
        return state

    def clocked(self, state: State) -> State:
        """Return the state with the time spent until now, by this process's clock: the device is not waited for."""
        return replace(state, seconds=state.seconds + (time.perf_counter() - self.clock if self.rows else 0.0))

    def resume(self) -> None:
        """Start the clock anew where a flush ended the window: evaluation and checkpoints are not training."""
        if not self.rows:
            self.clock, self.taught = time.perf_counter(), self.run.teacher.images
