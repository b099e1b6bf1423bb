"""Everything that the loop needs, built and ready: contracts only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from kd.contracts import Backend, Loader, Logger, RunStore, Sifter, Teacher
from kd.engine.criterion import Distillation
from kd.engine.evaluate import Evaluator
from kd.types import State

Span = Callable[[str], AbstractContextManager[object]]
"""`with span(NAME):` around a part of a step: data, teacher, forward, backward, optimizer, evaluation, checkpoint."""

_NOTHING = nullcontext()


def never() -> bool:
    """Nobody asks the run to stop."""
    return False


def no_span(name: str) -> AbstractContextManager[object]:
    """Mark nothing."""
    return _NOTHING


class Schedule(Protocol):
    """Sets the learning rate from the share of the run that is done."""

    def apply(self, optimizer: torch.optim.Optimizer, progress: float) -> float: ...


class Average(Protocol):
    """Averaged weights."""

    average: dict[str, torch.Tensor]

    def update(self, step: int) -> None: ...
    def apply(self) -> None: ...
    def applied(self) -> AbstractContextManager[None]: ...
    def load(self, average: dict[str, torch.Tensor]) -> None: ...


@dataclass(frozen=True, slots=True)
class RunLength:
    """How long the run is and how often things happen, in optimizer steps; 0 means each epoch."""

    epochs: int
    steps: int
    """0: `epochs` decides."""
    batch_size: int
    """Images per optimizer step, all ranks."""
    accumulate: int
    """Micro-batches per optimizer step on one rank."""
    views: int
    log: int
    evaluate: int
    checkpoint: int

    def progress(self, state: State, steps_in_epoch: int) -> float:
        """Return the share of the run that is done in the middle of the next step, 0 to 1."""
        if self.steps:
            return min(1.0, (state.step + 0.5) / self.steps)
        return min(1.0, (state.epoch + (state.step_in_epoch + 0.5) / steps_in_epoch) / self.epochs)

    def share(self, state: State) -> float:
        """Return the share of the run that was done when the current epoch began, 0 to 1."""
        if self.steps:
            return min(1.0, (state.step - state.step_in_epoch) / self.steps)
        return state.epoch / self.epochs

    def finished(self, state: State) -> bool:
        """Return whether nothing is left to train."""
        return state.step >= self.steps if self.steps else state.epoch >= self.epochs

    def view(self, epoch: int) -> int:
        """Return which view of the images an epoch sees."""
        return epoch % self.views if self.views else epoch


@dataclass(frozen=True, slots=True)
class Run:
    """One training run."""

    seed: int
    length: RunLength
    max_norm: float
    backend: Backend
    module: nn.Module
    """`distillation` as the backend wrapped it."""
    distillation: Distillation
    teacher: Teacher
    loader: Loader
    sifter: Sifter
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    average: Average | None
    evaluator: Evaluator
    store: RunStore
    logger: Logger
    span: Span = no_span
    """Marks what the loop is doing; free unless somebody listens."""
    stop: Callable[[], bool] = never
    """Asked at the end of each step and in evaluations: write a checkpoint now and raise Interrupted."""
