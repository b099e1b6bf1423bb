"""The training loop: `train`, read top to bottom, is the whole program."""

import itertools
from collections.abc import Generator
from contextlib import closing, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from kd.core.errors import Interrupted
from kd.core.scores import not_finite_text
from kd.core.seeds import seed_from
from kd.core.types import Batch, Plan, Small, State
from kd.engine.meter import Diverged, Meter, require_applied
from kd.engine.run import Run, Scoring, Stopping
from kd.engine.snapshot import (
    average_buffers,
    require_same_shapes,
    restore,
    shapes_of,
    snapshot,
)


def train(run: Run) -> State:
    """Distill the teacher into the student and return the final state."""
    # Random numbers in a step are seeded by (seed, step, rank), the data by (seed,
    # view, id), the order by (seed, epoch): a killed and resumed run computes the same
    # as an uninterrupted one.
    try:
        return _train(run)
    except Diverged as error:  # the epoch's data iterator is closed by now
        from kd.engine.diagnosis import locate_nonfinite  # most runs stay finite

        state, plan = error.at
        with closing(steps_of(run, plan, state)) as steps:
            raise locate_nonfinite(run, error, next(steps, [])) from None


def _train(run: Run) -> State:
    length = run.length
    every = length.every
    stop = Stopping(run)
    state = restore(run)
    first_step = state.step
    shapes = shapes_of(run)
    run.distillation.train()
    if state.unevaluated:
        state = evaluate_and_checkpoint(
            run, state, stop, evaluating=True, checkpointing=True
        )
    meter = Meter(run, state)
    planned_steps = length.steps or sum(length.planned(run.sifter))
    while not length.finished(state):
        with run.span("sifting"):
            plan = run.sifter.plan(state.epoch, length.share(state))
        steps_in_epoch = plan.steps or len(plan.ids) // length.batch_size
        with closing(steps_of(run, plan, state)) as steps:
            for micros in steps:
                run.backend.seed(
                    seed_from(run.seed, "step", state.step, run.backend.rank)
                )
                progress = length.progress(state, steps_in_epoch)
                lr = run.schedule.apply(run.optimizer, progress)
                meter.add(update(run, micros, state), state, plan)
                if state.step == first_step:
                    require_same_shapes(run, shapes)
                run.backend.end_step()
                state = advance(state, length.batch_size, steps_in_epoch)
                run.logger.step(state, min(1.0, state.step / planned_steps))

                last = length.finished(state)
                evaluating = last or due(every.evaluate, state)
                checkpointing = evaluating
                if every.checkpoint:
                    checkpointing = last or due(every.checkpoint, state)
                if stop() or due(every.log, state) or evaluating or checkpointing:
                    state = meter.flush(state, lr)
                if state.step_in_epoch == 0:
                    meter.log_epoch(state, plan, steps_in_epoch)
                state = evaluate_and_checkpoint(
                    run, state, stop, evaluating, checkpointing
                )
                meter.resume()
                if length.finished(state):
                    break
    require_applied(state)
    return state


def steps_of(run: Run, plan: Plan, state: State) -> Generator[list[Batch], None, None]:
    """Yield the micro-batches of each remaining step of an epoch."""
    view = run.length.view(state.epoch)
    start = state.step_in_epoch
    small_steps = run.length.small_steps(state, plan)
    small = None
    if small_steps:
        small = Small(small_steps, run.teacher.unanswered(view, plan.ids))
    loaded = run.loader.epoch(plan, view, run.sifter.first(start), small)
    on_device = run.backend.put(run.teacher.lookup(loaded))
    batches = run.sifter.stream(on_device, Scoring(run), start)
    while True:
        with run.span("data"):
            micros = list(itertools.islice(batches, run.accumulate))
        if len(micros) < run.accumulate:  # an unfinished step at the end is dropped
            return
        yield micros


def update(run: Run, micros: list[Batch], state: State) -> dict[str, Tensor]:
    """Make one optimizer step and return means over this rank's images."""
    statistics = copy_statistics(run) if run.skip_nonfinite else []
    with run.distillation.frozen_layers(state):
        means = backward(run, micros)
    with run.span("optimizer"):
        means["grad_norm"] = run.backend.step(run.optimizer, run.max_norm)
        for tensor, copy in statistics:
            tensor.copy_(torch.where(means["grad_norm"].isfinite(), tensor, copy))
        if run.average is not None:
            run.average.update(state.step + 1)
    return means


def backward(run: Run, micros: list[Batch]) -> dict[str, Tensor]:
    """Compute a step's gradients and return the means over this rank's images."""
    means: dict[str, Tensor] = {}
    for number, batch in enumerate(micros, 1):
        # the teacher first, so that no student activations are alive beside it
        with run.span("teacher"):
            teacher = run.teacher(batch)
        unfinished = number < len(micros)
        with run.backend.no_sync(run.module) if unfinished else nullcontext():
            with run.span("forward"), run.backend.autocast():
                logits_BC, scores = run.module(batch, teacher)
            # the last micro-batch's backward includes the gradient reduction
            with run.span("backward"):
                (scores["loss"].mean() / len(micros)).backward()
        with run.span("sifting"):
            losses_B = scores.pop("per_image").nan_to_num(0.0, 0.0, 0.0)
            run.sifter.observe(batch.ids, losses_B)
        scores |= run.evaluator.training(logits_BC, batch)
        for name, score_B in scores.items():
            mean = score_B.detach().mean() / len(micros)
            means[name] = means[name] + mean if name in means else mean
    return means


def copy_statistics(run: Run) -> list[tuple[Tensor, Tensor]]:
    """Return the student's running statistics, each with a copy to restore."""
    student = run.distillation.student
    saved_names = student.state_dict().keys()
    return [
        (buffer, buffer.clone())
        for name, buffer in student.named_buffers()
        if name in saved_names and buffer.is_floating_point()
    ]


def evaluate_and_checkpoint(
    run: Run, state: State, stop: Stopping, evaluating: bool, checkpointing: bool
) -> State:
    """Evaluate and write a checkpoint after a step if due.

    Raises:
        Interrupted: Any rank was asked to stop.
    """
    chosen = False
    if evaluating or checkpointing or stop.agreed:
        average_buffers(run, state)
    if evaluating:
        with run.span("evaluation"):
            state, chosen = evaluate(run, state, stop)
    if checkpointing or chosen or stop.agreed or run.length.gave_up(state):
        with run.span("checkpoint"):
            snapshot(run, state, chosen)
    if stop.agreed:
        raise Interrupted(
            f"stopped after step {state.step} and wrote a checkpoint; the same command"
            " resumes"
        )
    return state


def evaluate(run: Run, state: State, stop: Stopping) -> tuple[State, bool]:
    """Evaluate the student, and return whether its weights are the ones to keep.

    Averaged weights are evaluated where there are any. The newest one is kept whose
    score is at most one standard error below the highest (the rule of Breiman et al.,
    Classification and Regression Trees, 1984, section 3.4.3, for the newest in place of
    the smallest): of few images the highest score is often luck, early, at a high
    learning rate. See `choice_of_checkpoint_*.csv`.
    """
    # An evaluation may take longer than a stopping run has left, so it is then
    # abandoned.
    values: dict[str, float] = {}
    stop.restart()
    with run.average.applied() if run.average is not None else nullcontext():
        if not stop.agreed:
            values = run.evaluator(run.distillation.student, stop=stop)
    stop.restart()
    if not values:
        return replace(state, unevaluated=True), False
    score = values[run.evaluator.selection_metric]
    best = max(state.best, score)
    chosen = score >= best - run.evaluator.standard_error(best)
    # `patience` begins with full-size images
    small = run.length.share(state) < run.length.small_until
    no_better = 0 if small or score > state.best else state.no_better + 1
    state = replace(state, best=best, no_better=no_better, unevaluated=False)
    run.store.log("val", state, values)
    run.logger.log("val", state, values)
    run.logger.info(not_finite_text(values))
    return state, chosen


def advance(state: State, images: int, steps_in_epoch: int) -> State:
    """Return the state after one more step."""
    ends_epoch = state.step_in_epoch + 1 >= steps_in_epoch
    return replace(
        state,
        step=state.step + 1,
        images=state.images + images,
        epoch=state.epoch + ends_epoch,
        step_in_epoch=0 if ends_epoch else state.step_in_epoch + 1,
    )


def due(every: int, state: State) -> bool:
    """Return whether an action with interval `every` is due; 0 means each epoch."""
    return state.step % every == 0 if every else state.step_in_epoch == 0
