"""Trial steps, and how candidates are timed: in turns, as medians, decided by rank 0."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch

from kd.core.contracts import Backend, Teacher
from kd.core.errors import KdError
from kd.core.types import Batch, Outputs
from kd.engine.criterion import Distillation

HOPELESS_SECONDS, HOPELESS_RATIO = 0.5, 4.0
CPU_TRIAL = 16  # images of a trial on a CPU at most; an accelerator needs the whole micro-batch to be busy

Work = Callable[[], torch.Tensor]  # does a piece of work once and returns a tensor that is waited for
Name = TypeVar("Name", bound=Hashable)  # of a candidate: a text, or an execution mode


class Trial:
    """Training steps on noise, made as the loop makes them.

    A context manager: its end drops gradients and restores batch norm's statistics and the training mode.
    """

    def __init__(
        self, distillation: Distillation, teacher: Teacher, backend: Backend, image_size: int, images: int
    ) -> None:
        """Prepare steps; nothing is computed yet."""
        self.distillation, self.teacher, self.backend = distillation, teacher, backend
        self.image_size, self.images = image_size, images
        self._training = distillation.training
        self._buffers: dict[str, torch.Tensor] | None = None

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._buffers is not None:
            self.distillation.train(self._training).zero_grad()
            for name, buffer in self.distillation.named_buffers():
                buffer.copy_(self._buffers[name])

    def _begin(self, training: bool) -> None:
        if self._buffers is None:
            self._buffers = {name: buffer.clone() for name, buffer in self.distillation.named_buffers()}
        self.distillation.train(training)

    @cached_property
    def batch(self) -> Batch:
        """Noise, uint8, with labels of the task."""
        student: Any = self.distillation.student
        labels = self.distillation.task.no_labels(self.images, student.num_classes)
        return noise(self.images, self.image_size, self.backend, labels)

    @cached_property
    def outputs(self) -> Outputs:
        return self.teacher(self.batch)

    def ask(self) -> torch.Tensor:
        return self.teacher(self.batch).main

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
        """Run the student's forward and backward, and an optimizer's step where one is given; return the loss."""
        self._begin(training=True)
        with self.backend.autocast():
            _, scores = self.distillation(self.batch, self.outputs)
        loss = scores["loss"].mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        self.distillation.zero_grad()
        self.backend.end_step()
        return loss.detach()

    def score(self) -> torch.Tensor:
        """Run the student's forward as a scoring pass does; return the losses [B]."""
        self._begin(training=False)
        with torch.no_grad(), self.backend.autocast():
            loss = self.distillation(self.batch, self.outputs)[1]["loss"]
        self.backend.end_step()
        return loss


def trial_images(micro_batch: int, backend: Backend) -> int:
    """Return how many images a trial has."""
    return min(micro_batch, CPU_TRIAL) if backend.device.type == "cpu" else micro_batch


def noise(images: int, size: int, backend: Backend, labels: torch.Tensor | None = None) -> Batch:
    """Make a batch of noise, uint8 [images, 3, size, size]; without labels all are class 0."""
    image = torch.randint(256, (images, 3, size, size), dtype=torch.uint8).to(backend.device)
    labels = torch.zeros(images, dtype=torch.int64) if labels is None else labels
    return Batch.of(image, labels.to(image.device))


def fastest(
    candidates: Mapping[Name, Work],
    backend: Backend,
    rounds: int = 4,
    budget_seconds: float = 20.0,
    margin: float = 0.0,
    warm: bool = False,
) -> tuple[Name, dict[Name, float]]:
    """Return the name of the fastest candidate and the median milliseconds of each, as rank 0 measured them.

    The candidates run in turns, so that a busy neighbour slows them alike; the first round only warms up. A candidate
    that takes over half a second and four times as long as the best drops out. One measured round is enough where the
    budget is spent. All ranks follow rank 0: a candidate may hold collectives (a sharded teacher's does), which all
    ranks must enter equally often.

    The first candidate is the plain one; another wins where it is faster by the share `margin` in all rounds but one.
    `warm` runs each once beforehand: what compiles in its first call would otherwise drop out.
    """
    names = list(candidates)
    if len(names) == 1:
        return names[0], {}
    samples: dict[Name, list[float]] = {name: [] for name in names}
    racing = list(names)
    for name in names if warm else names[:1]:
        candidates[name]().sum().item()  # what is set up once is not measured
    start = time.perf_counter()
    for turn in range(rounds + 1):
        for name in racing:
            samples[name].append(_seconds(candidates[name]))
        best = min(samples[name][-1] for name in racing)
        racing = [name for name in racing if samples[name][-1] < max(HOPELESS_SECONDS, HOPELESS_RATIO * best)]
        spent = turn > 0 and time.perf_counter() - start > budget_seconds
        go_on = of_rank_0([float(name in racing and not spent) for name in names], backend)
        racing = [name for name, on in zip(names, go_on, strict=True) if on]
        if not racing:
            break
    measured = {name: times[1:] or times for name, times in samples.items()}
    medians = of_rank_0([1000 * statistics.median(times) for times in measured.values()], backend)
    winner = names[int(of_rank_0([names.index(clear_winner(measured, margin))], backend)[0])]
    return winner, {name: round(value, 2) for name, value in zip(names, medians, strict=True)}


def clear_winner(rounds: Mapping[Name, Sequence[float]], margin: float) -> Name:
    """Return which is faster than the first by a share `margin` in all rounds but one, by most; else the first."""
    plain = next(iter(rounds))
    if not margin:
        return min(rounds, key=lambda name: statistics.median(rounds[name]))
    shares = {}
    for name, times in rounds.items():
        shares[name] = sorted(mine / its for mine, its in zip(times, rounds[plain], strict=False))
        del shares[name][max(2, len(shares[name]) - 1) :]  # a neighbour may have been busy in one
    best = min(shares, key=lambda name: shares[name][-1])
    return best if shares[best][-1] <= 1 - margin else plain


def milliseconds(work: Work, backend: Backend) -> float:
    """Return how long a piece of work takes on rank 0, measured once after a warm-up."""
    work().sum().item()
    return of_rank_0([1000 * _seconds(work)], backend)[0]


def _seconds(work: Work) -> float:
    before = time.perf_counter()
    work().sum().item()  # waits for the device
    return time.perf_counter() - before


def of_rank_0(numbers: list[float], backend: Backend) -> list[float]:
    """Return rank 0's numbers on every rank."""
    shared = torch.tensor(numbers, device=backend.device)
    backend.broadcast_([shared])
    return shared.tolist()


def attempt(work: Work, backend: Backend) -> str:
    """Do a piece of work once; return why it cannot be done on some rank, or "" where all ranks can.

    No collective may lie inside: a rank that fails would leave the others waiting.
    """
    reason = ""
    try:
        work().sum().item()
    except Exception as error:  # compilers, exporters and runtimes fail in their own ways
        reason = in_short(error)
    failed = backend.reduce_sum(torch.tensor([float(bool(reason))], device=backend.device)).item()
    return reason or ("it failed on another rank" if failed else "")


def in_short(error: Any) -> str:
    """Return the message of an error, short enough for one line."""
    if isinstance(error, KdError):
        return error.wrong
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
