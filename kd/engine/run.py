"""`Run`: the objects that the loop uses; `Scoring`: the sifters' forward pass."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.contracts import Backend, Loader, Sifter, Teacher
from kd.core.errors import ModelError, first_sentence
from kd.core.evaluation import Evaluator
from kd.core.every import Intervals
from kd.core.types import Batch, Plan, State, TeacherOutputs
from kd.engine.criterion import StudentWithLoss
from kd.engine.optim import EMA, Schedule

# seconds until a rank's signal reaches the other ranks; torchrun kills 30 s after its
# signal
STOP_SECONDS = 1.0
# most epochs for which the sifter counts steps: takes up to a second
MOST_PLANNED = 1000
STOP_CALLS = 50  # most calls between two reductions, in case later calls are slower

Span = Callable[[str], AbstractContextManager[object]]
"""`with span(NAME):` around a part of a step: data, sifting, teacher, forward,
backward, optimizer, wait, evaluation, checkpoint. Spans may be nested.
"""
Window = Callable[[State], Mapping[str, float]]
"""Called where a log window ends, after device synchronization; returns what to add to
the training row.
"""


def never() -> bool:
    """Never request a stop."""
    return False


class Logger(Protocol):
    """Shows the progress of a run; never waits for the device."""

    def step(self, state: State, progress: float) -> None:
        """Show the state after a step, and the share of planned steps done, 0 to 1."""

    def log(self, kind: str, state: State, values: dict[str, float]) -> None: ...

    def info(self, text: str) -> None:
        """Show a line; an empty text shows nothing."""


class RunStore(Protocol):
    """Storage for metrics and checkpoints of a run; rank 0 writes one folder."""

    def log(self, kind: str, state: State, values: dict[str, float]) -> None:
        """Write a row of metrics: `kind` is "train" or "val"."""

    def checkpoint(
        self, state: State, tensors: dict[str, Tensor], info: dict[str, Any], best: bool
    ) -> None:
        """Write a checkpoint, such that after a crash the old or the new one exists."""

    def restore(self) -> tuple[State, dict[str, Tensor], dict[str, Any]] | None:
        """Return the newest complete checkpoint, or None for a new run."""
        ...


@dataclass(frozen=True, slots=True)
class RunLength:
    """Length and intervals of the run."""

    epochs: int
    steps: int  # 0: `epochs` decides
    batch_size: int  # images per optimizer step, all ranks
    # views per image; epoch e shows view `e mod views`. 0: a fresh view every epoch.
    views: int
    every: Intervals
    # evaluations in a row without a better score that end the run; 0: never
    patience: int = 0
    small_until: float = 0.0  # first share of the run, with small images

    def progress(self, state: State, steps_in_epoch: int) -> float:
        """Return the progress of the run in the middle of the next step, 0 to 1."""
        if self.steps:
            return min(1.0, (state.step + 0.5) / self.steps)
        in_epoch = (state.step_in_epoch + 0.5) / steps_in_epoch
        return min(1.0, (state.epoch + in_epoch) / self.epochs)

    def share(self, state: State) -> float:
        """Return the progress of the run at the start of the current epoch, 0 to 1."""
        if self.steps:
            return min(1.0, (state.step - state.step_in_epoch) / self.steps)
        return state.epoch / self.epochs

    def small_steps(self, state: State, plan: Plan) -> int:
        """Return how many first steps of the plan of an epoch show small images."""
        candidate_steps = len(plan.ids) // self.batch_size
        steps = plan.steps or candidate_steps
        begin = state.step - state.step_in_epoch

        def progress(step: int) -> float:
            at = replace(state, step=begin + step, step_in_epoch=step)
            return self.progress(at, steps)

        small_steps = bisect_left(range(steps), self.small_until, key=progress)
        # a step may have images from several steps of the plan, so an epoch has one
        # size
        if plan.steps:
            return candidate_steps if 2 * small_steps >= steps else 0
        return small_steps

    def gave_up(self, state: State) -> bool:
        return 0 < self.patience <= state.no_better

    def finished(self, state: State) -> bool:
        if self.gave_up(state):
            return True
        return state.step >= self.steps if self.steps else state.epoch >= self.epochs

    def planned(self, sifter: Sifter) -> list[int]:
        """Return the steps of each epoch, as the sifter plans them."""
        # Epochs after `MOST_PLANNED` repeat the last.
        steps_by_epoch: list[int] = []
        total = 0
        steps = 0
        while total < self.steps if self.steps else len(steps_by_epoch) < self.epochs:
            epoch = len(steps_by_epoch)
            if epoch < MOST_PLANNED:
                share = self.share(State(step=total, epoch=epoch))
                steps = max(1, sifter.steps(epoch, share))
            steps_by_epoch.append(steps)
            total += steps
        return steps_by_epoch

    def view(self, epoch: int) -> int:
        return epoch % self.views if self.views else epoch


@dataclass(frozen=True, slots=True)
class Run:
    """One training run."""

    seed: int
    length: RunLength
    accumulate: int  # micro-batches per optimizer step on one rank
    max_norm: float
    backend: Backend
    module: nn.Module  # `distillation` as the backend wrapped it
    distillation: StudentWithLoss
    teacher: Teacher
    loader: Loader
    sifter: Sifter
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    average: EMA | None
    evaluator: Evaluator
    store: RunStore
    logger: Logger
    # go on after a step with a non-finite gradient, which is never applied
    skip_nonfinite: bool = False
    span: Span = nullcontext  # marks the loop's current part; free without a listener
    window: Window = lambda state: {}  # ends the listener's log window
    stop: Callable[[], bool] = never
    """Called after each step and in evaluations.

    True: write a checkpoint now and raise Interrupted.
    """


class Stopping:
    """Evaluate `run.stop` with the same result on all ranks."""

    # A single process checks every time. Several reduce the result about every
    # `STOP_SECONDS`, since that syncs the device. The number of calls between two
    # reductions follows from a reduced time, so it is equal on all ranks.

    def __init__(self, run: Run) -> None:
        self.run = run
        self.agreed = False
        self.restart()

    def restart(self) -> None:
        """Reduce at the next call, because the time per call changes."""
        self._every = 1
        self._calls = 0
        self._clock = time.perf_counter()

    def __call__(self) -> bool:
        """Return whether all ranks stop now; all must call it equally often."""
        backend = self.run.backend
        if backend.world_size == 1 or self.run.stop is never:  # on all ranks alike
            self.agreed = self.agreed or self.run.stop()
            return self.agreed
        self._calls += 1
        if self.agreed or self._calls < self._every:
            return self.agreed
        seconds = (time.perf_counter() - self._clock) / self._calls
        mine = torch.tensor([float(self.run.stop()), seconds], device=backend.device)
        with self.run.span("wait"):
            stops, total = backend.reduce_sum(mine).tolist()
        self.agreed = stops > 0
        self.restart()
        calls = int(STOP_SECONDS * backend.world_size / max(total, 1e-9))
        self._every = max(1, min(STOP_CALLS, calls))
        return self.agreed


class Scoring:
    """Score the images of one step on all ranks, without training.

    See `kd.core.contracts.Score`.
    """

    # Shape legend: A micro-batches a step on one rank, W ranks, M images of a
    # micro-batch.

    def __init__(self, run: Run) -> None:
        self.run = run

    @torch.no_grad()
    def __call__(
        self, batches: Sequence[Batch], shrink: int = 1
    ) -> tuple[Tensor, list[Batch]]:
        backend = self.run.backend
        distillation = self.run.distillation
        scored = []
        losses = []
        with self.run.span("sifting"):
            # batch norm's statistics and dropout's draws belong to training
            distillation.eval()
            for batch in batches:
                with self.run.span("teacher"):  # the step reuses these outputs
                    outputs = self.run.teacher(batch)
                with backend.autocast(), shrunk(batch, shrink) as small:
                    losses.append(distillation(small, outputs)[1]["per_image"].float())
                # no `crc`: there is no further lookup, and selecting rows would sync
                # with the host
                scored.append(
                    replace(batch, teacher_outputs=TeacherOutputs(outputs), crc=())
                )
            distillation.train()
            all_AWM = torch.zeros(
                len(losses), backend.world_size, len(losses[0]), device=backend.device
            )
            all_AWM[:, backend.rank] = torch.stack(losses)
            total = backend.reduce_sum(all_AWM)
            backend.end_step()
            return total.flatten(), scored

    def cut(self) -> None:
        self.run.backend.end_step()


@contextmanager
def shrunk(batch: Batch, times: int) -> Iterator[Batch]:
    """Average-pool the images of a batch by `times`."""
    if times == 1:
        yield batch
        return
    small = F.avg_pool2d(batch.image.float(), times)
    small = small if batch.image.is_floating_point() else small.round()
    try:
        yield replace(batch, image=small.to(batch.image.dtype))
    except (AssertionError, RuntimeError) as error:
        wrong = (
            f"is {times}, but the student takes no smaller images"
            f" ({first_sentence(error, 120)})"
        )
        remedy = (
            "Set sifter.shrink=1, or for a ViT of timm student.args={dynamic_img_size:"
            " true}"
        )
        raise ModelError(
            "sifter.shrink", wrong, "1 for this student", remedy
        ) from error
