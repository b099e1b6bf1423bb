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
        with closing(steps_of(run, plan, state)) as again:
            raise locate_nonfinite(run, error, next(again, [])) from None


def _train(run: Run) -> State:
    length, every, backend, stop = (
        run.length,
        run.length.every,
        run.backend,
        Stopping(run),
    )
    state = restore(run)
    begin, shapes = state.step, shapes_of(run)
    run.distillation.train()
    if state.unevaluated:
        state = evaluate_and_checkpoint(
            run, state, stop, evaluating=True, checkpointing=True
        )
    meter, planned = Meter(run, state), length.steps or sum(length.planned(run.sifter))
    while not length.finished(state):
        with run.span("sifting"):
            plan = run.sifter.plan(state.epoch, length.share(state))
        steps_in_epoch = plan.steps or len(plan.ids) // length.batch_size
        with closing(steps_of(run, plan, state)) as steps:
            for micros in steps:
                backend.seed(seed_from(run.seed, "step", state.step, backend.rank))
                progress = length.progress(state, steps_in_epoch)
                lr = run.schedule.apply(run.optimizer, progress)
                meter.add(update(run, micros, state), state, plan)
                if state.step == begin:
                    require_same_shapes(run, shapes)
                backend.end_step()
                state = advance(state, length.batch_size, steps_in_epoch)
                run.logger.step(state, min(1.0, state.step / planned))
                last = length.finished(state)
                evaluating = due(every.evaluate, state) or last
                checkpointing = (
                    due(every.checkpoint, state) if every.checkpoint else evaluating
                ) or last
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
    """Yield the micro-batches of each remaining step of an epoch: loaded, looked up,
    moved, sifted.
    """
    view, start, steps = (
        run.length.view(state.epoch),
        state.step_in_epoch,
        run.length.small_steps(state, plan),
    )
    small = Small(steps, run.teacher.unanswered(view, plan.ids)) if steps else None
    loaded = run.loader.epoch(plan, view, run.sifter.first(start), small)
    sent = run.backend.put(run.teacher.lookup(loaded))
    batches = run.sifter.stream(sent, Scoring(run), start)
    while True:
        with run.span("data"):
            micros = list(itertools.islice(batches, run.accumulate))
        if len(micros) < run.accumulate:  # an unfinished step at the end is dropped
            return
        yield micros


def update(run: Run, micros: list[Batch], state: State) -> dict[str, Tensor]:
    """Make one optimizer step from the micro-batches; return means over this rank's
    images, on the device.
    """
    sums: dict[str, Tensor] = {}
    before = statistics(run) if run.skip_nonfinite else []
    with (
        run.distillation.frozen.held(state)
        if run.distillation.frozen is not None
        else nullcontext()
    ):
        backward(run, micros, sums)
    with run.span("optimizer"):
        sums["grad_norm"] = run.backend.step(run.optimizer, run.max_norm)
        for tensor, saved in before:
            tensor.copy_(torch.where(sums["grad_norm"].isfinite(), tensor, saved))
        if run.average is not None:
            run.average.update(state.step + 1)
    return sums


def backward(run: Run, micros: list[Batch], sums: dict[str, Tensor]) -> None:
    """Compute the gradients of a step, and add the mean of each score over this rank's
    images to `sums`.
    """
    for i, batch in enumerate(micros):
        with run.span("teacher"):
            teacher = run.teacher(
                batch
            )  # first, so that no student activations are alive beside it
        more = i + 1 < len(micros)
        with run.backend.no_sync(run.module) if more else nullcontext():
            with run.span("forward"), run.backend.autocast():
                logits_BC, scores = run.module(batch, teacher)
            with run.span(
                "backward"
            ):  # the last micro-batch's backward includes the gradient reduction
                (scores["loss"].mean() / len(micros)).backward()
        with run.span("sifting"):
            run.sifter.observe(
                batch.ids, scores.pop("per_image").nan_to_num(0.0, 0.0, 0.0)
            )
        scores |= run.evaluator.training(logits_BC, batch)
        for name, score_B in scores.items():
            mean = score_B.detach().mean() / len(micros)
            sums[name] = sums[name] + mean if name in sums else mean


def statistics(run: Run) -> list[tuple[Tensor, Tensor]]:
    """Return the student's running statistics (batch norm), each with a copy: a skipped
    step must restore them.
    """
    buffers = run.distillation.student.named_buffers()
    saved = run.distillation.student.state_dict().keys()
    return [
        (b, b.clone()) for name, b in buffers if name in saved and b.is_floating_point()
    ]


def evaluate_and_checkpoint(
    run: Run, state: State, stop: Stopping, evaluating: bool, checkpointing: bool
) -> State:
    """Evaluate and write a checkpoint after a step if due; raise Interrupted if any
    rank was asked to stop.
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
    """Evaluate the student (its averaged weights where there are any); return whether
    it is the one to keep.

    The newest one is kept whose score is at most one standard error below the highest
    (the rule of Breiman et al., Classification and Regression Trees, 1984, section
    3.4.3, for the newest in place of the smallest): of few images the highest score is
    often luck, early, at a high learning rate. See `choice_of_checkpoint_*.csv`.
    """
    # An evaluation may take longer than a stopping run has left, so it is then
    # abandoned.
    stop.restart()
    with run.average.applied() if run.average is not None else nullcontext():
        values = (
            {} if stop.agreed else run.evaluator(run.distillation.student, stop=stop)
        )
    stop.restart()
    if not values:
        return replace(state, unevaluated=True), False
    decisive = values[run.evaluator.selection_metric]
    improved = decisive > state.best
    best = max(state.best, decisive)
    chosen = decisive >= best - run.evaluator.standard_error(best)
    small = (
        run.length.share(state) < run.length.small_until
    )  # `patience` begins with full-size images
    no_better = 0 if improved or small else state.no_better + 1
    state = replace(state, best=best, no_better=no_better, unevaluated=False)
    run.store.log("val", state, values)
    run.logger.log("val", state, values)
    run.logger.info(not_finite_text(values))
    return state, chosen


def advance(state: State, images: int, steps_in_epoch: int) -> State:
    """Return the state after one more step."""
    turn = state.step_in_epoch + 1 >= steps_in_epoch
    state = replace(
        state,
        step=state.step + 1,
        images=state.images + images,
        epoch=state.epoch + turn,
    )
    return replace(state, step_in_epoch=0 if turn else state.step_in_epoch + 1)


def due(every: int, state: State) -> bool:
    """Return whether an action with interval `every` steps is due; 0: at the end of
    each epoch.
    """
    return state.step % every == 0 if every else state.step_in_epoch == 0
