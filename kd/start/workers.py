"""How many processes load images, and how many threads compute beside them: measured at the start of a run.

Beside an accelerator the cores have nothing else to do: as many workers as keep ahead of its step. On a CPU workers and
threads want the same cores, and what two of them together cost is not what each costs alone: pairs of both are raced as
they will run, a loader that feeds a step.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kd.config import Config
from kd.contracts import Backend, Dataset, Teacher
from kd.data.loader import LocalLoader
from kd.engine.criterion import Distillation
from kd.engine.probe import fastest
from kd.errors import DataError
from kd.host import cores
from kd.start.kernels import CPU_TRIAL, Table, trial_batch
from kd.start.loading import sample
from kd.types import Batch, Outputs, Plan

SAMPLE, SAMPLE_SECONDS = 16, 1.0
"""Images that are loaded to see what loading costs, and when to be content with fewer."""
AHEAD = 1.25
"""How much faster than an accelerator's step its workers should be: no image costs what the median costs."""
CLEARLY = 0.05
"""The share of an image's time by which another pair must win over the plain one: less may be noise."""
UNMEASURED = 16
"""Workers beside an accelerator at most, where its step is not measured."""
TURN_STEPS, TURN_SECONDS, RACE_SECONDS = 3, 0.15, 3.0
"""Steps of one turn of the race on a CPU, about how long a turn should take, and when the race is over at the latest,
as far as every pair has had its turn."""

Pair = tuple[int, int]
"""Threads of the step, worker processes."""
Turn = Callable[[], torch.Tensor]
"""Makes a few steps and returns the last loss."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What an image costs, milliseconds."""

    load: float
    """Reading, decoding and augmenting it, in one process."""
    step: float
    """The teacher's answer and the student's forward and backward."""

    def __str__(self) -> str:
        return f"loading {self.load:.3g} ms an image, step {self.step:.3g} ms"


def choose_workers(
    config: Config,
    dataset: Dataset,
    distillation: Distillation,
    teacher: Teacher,
    micro: int,
    backend: Backend,
    choices: dict[str, str],
    pinned: Mapping[str, str],
) -> tuple[int, str, Table]:
    """Put a number in place of `data.workers: auto`; write it, and the CPU threads it goes with, into `choices`.

    All ranks must call it, and take what rank 0 measured.

    Args:
        config: of the run.
        dataset: the views of the training images.
        distillation: the student and its losses; copied for the trial.
        teacher: asked as often as in training.
        micro: images of a micro-batch.
        backend: of this rank; its CPU threads are set.
        choices: of this start.
        pinned: of an earlier start of this run; its threads stay.

    Returns:
        The number of workers of this rank; a line for a person; what was raced, milliseconds of a turn.
    """
    if config.data.workers != "auto":
        return int(config.data.workers), "", {}
    share = _share(backend)
    if 0 <= int(choices.get("workers", -1)) <= share:  # else it goes on on a smaller machine
        return int(choices["workers"]), f"workers: {choices['workers']} (as this run began)", {}
    on_cpu = backend.device.type == "cpu"
    table: Table = {}
    if backend.fixed_mode or (on_cpu and share == 1):
        workers = unmeasured(backend.device.type, share)
        told = "one core a rank: it loads between steps" if on_cpu else "not measured: each trial would be compiled"
    else:
        decoded = min(1.0, 1 / _passes(config, len(dataset))) if config.data.store != "none" else 0.0
        load, ids = loading_ms(dataset, decoded)
        work = _Step(distillation, teacher, share_asked(config), backend)
        pace = _agreed(Pace(load, work.milliseconds(trial_batch(config, micro, backend))), backend)
        if on_cpu:
            threads = torch.get_num_threads()
            free = bool(backend.thread_counts) and "threads" not in pinned
            names = pairs(pace, threads, share, free, alone=not decoded)
            (threads, workers), told, table = _race(names, pace, dataset, ids, micro, work, backend)
            torch.set_num_threads(threads)
            choices |= {"threads": str(threads)} if free else {}
        else:
            workers, told = ahead(pace, share, config.data.store != "none")
    choices["workers"] = str(workers)
    return workers, f"workers: {workers} ({told})", table


def _share(backend: Backend) -> int:
    """Return this rank's cores; what follows holds collectives, so that all ranks go by rank 0's number."""
    share = torch.tensor([float(max(1, cores() // backend.local_world_size))], device=backend.device)
    if backend.world_size > 1 and not backend.fixed_mode:  # nothing is raced where each trial would be compiled
        backend.broadcast_([share])
    return int(share.item())


def unmeasured(device_type: str, share: int) -> int:
    """Return the plain number of workers: on a CPU one, which hides reading; else all of this rank's cores but one."""
    if device_type == "cpu":
        return 1 if share > 1 else 0
    return max(1, min(UNMEASURED, share - 1))


def ahead(pace: Pace, share: int, stored: bool) -> tuple[int, str]:
    """Return how many workers keep ahead of an accelerator's step, and what to tell the user.

    Args:
        pace: measured.
        share: cores of this rank, of which one is its own.
        stored: images are decoded once already.
    """
    wanted = max(1, math.ceil(AHEAD * pace.load / pace.step))
    workers = min(wanted, max(1, share - 1))
    if workers == wanted:
        return workers, f"{pace}: {'one worker is' if workers == 1 else f'{workers} are'} ahead of the step"
    remedy = "Fewer ranks on this machine, or more cores" + ("" if stored else ", or data.store=disk")
    return workers, f"{pace}: {wanted} would keep ahead, this rank has {share} cores, so the step will wait. {remedy}"


def pairs(pace: Pace, threads: int, share: int, free: bool, alone: bool = True) -> list[Pair]:
    """List the pairs of threads and workers that are worth trying on a CPU, the plain one first.

    Whatever the pair, loading cannot cost more than itself: where that is less than what `CLEARLY` asks for, no other
    can win and there is nothing to race.

    Args:
        pace: measured.
        threads: of the step, as they are.
        share: cores of this rank, at least 2.
        free: whether the number of threads may change.
        alone: whether to try without workers. Not where a store is still to be filled: the race sees what is in it,
            and a worker hides the decoding of the first pass.
    """
    plain = threads, 1
    if pace.load <= CLEARLY * pace.step:
        return [plain]
    busy = max(1, min(math.ceil(pace.load / pace.step), share - 1))
    found = [plain, (threads, busy)]
    if free:
        found.append((max(1, share - busy), busy))
    if alone:
        found.append((threads, 0))
    return list(dict.fromkeys(found))


def clear_winner(times: Sequence[float]) -> int:
    """Return the position of the least time, or 0, the plain choice, where that wins by less than `CLEARLY`."""
    best = min(range(len(times)), key=times.__getitem__)
    return best if times[best] < (1 - CLEARLY) * times[0] else 0


def loading_ms(dataset: Dataset, decoded: float = 0.0) -> tuple[float, list[int]]:
    """Return the milliseconds of loading an image in this process, and which of the sample can be read.

    Args:
        dataset: every image of the sample is loaded twice: where there is a store, the second time comes out of it.
        decoded: share of the loads that will be like the first.
    """
    first, second, ids = [], [], []
    start = time.perf_counter()
    for id in sample(len(dataset), SAMPLE):
        before = time.perf_counter()
        try:
            if not dataset.load(id, 0).readable:
                continue
        except DataError:
            continue  # not asked for by training yet, which stops there or goes on as data.on_corrupt says
        between = time.perf_counter()
        dataset.load(id, 0)
        first.append(between - before)
        second.append(time.perf_counter() - between)
        ids.append(id)
        if time.perf_counter() - start > SAMPLE_SECONDS and len(ids) > 2:
            break
    if not ids:
        return 0.0, []
    return 1000 * (decoded * statistics.median(first) + (1 - decoded) * statistics.median(second)), ids


def share_asked(config: Config) -> float:
    """Return in how many epochs of the run the teacher's forward is run: with a cache, only while it fills."""
    kept = config.teacher.cache.views
    return min(1.0, kept / config.run.epochs) if kept and not config.run.steps else 1.0


def _passes(config: Config, num_images: int) -> float:
    """Return how often the run visits an image."""
    if config.run.steps and isinstance(config.data.batch_size, int):
        return max(1.0, config.run.steps * config.data.batch_size / num_images)
    return float(config.run.epochs)


class _Step:
    """The teacher's answer and the student's forward and backward, on a copy of the student."""

    def __init__(self, distillation: Distillation, teacher: Teacher, asked: float, backend: Backend) -> None:
        self.trial, self.teacher, self.asked, self.backend = copy.deepcopy(distillation), teacher, asked, backend
        self._said: Outputs | None = None

    def milliseconds(self, batch: Batch) -> float:
        """Return what an image of the batch costs, the teacher as far as it is asked."""
        answers = self.teacher(batch)
        teacher = _seconds(lambda: self.teacher(batch).logits)
        student = _seconds(lambda: self.learn(batch, answers))
        return 1000 * (self.asked * teacher + student) / len(batch.label)

    def learn(self, batch: Batch, answers: Outputs) -> torch.Tensor:
        """Go forward and backward."""
        with self.backend.autocast():
            _, scores = self.trial(batch, answers)
        loss = scores["loss"].mean()
        loss.backward()
        self.trial.zero_grad()
        return loss.detach()

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Make a step as most of the run's steps are: where the teacher is mostly not asked, its first answer does."""
        if self.asked > 0.5 or self._said is None:
            self._said = self.teacher(batch)
        return self.learn(batch, self._said)


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """Return the lesser of two times, after a warm-up; always three calls, since they may hold collectives."""
    times = []
    for _ in range(3):
        before = time.perf_counter()
        work().sum().item()
        times.append(time.perf_counter() - before)
    return min(times[1:])


def _agreed(pace: Pace, backend: Backend) -> Pace:
    numbers = torch.tensor([pace.load, pace.step], device=backend.device)
    backend.broadcast_([numbers])
    return Pace(*numbers.tolist())


def _race(
    names: list[Pair], pace: Pace, dataset: Dataset, ids: list[int], micro: int, work: _Step, backend: Backend
) -> tuple[Pair, str, Table]:
    """Let the pairs run in turns; return the one to take, what to tell the user, milliseconds of a turn of each."""
    if len(names) == 1:
        return names[0], f"{pace}: loading cannot hold the step up", {}
    fitting = round(1000 * TURN_SECONDS / TURN_STEPS / (pace.load + pace.step))
    count = min(micro, CPU_TRIAL, max(2, fitting))  # batch norm wants two
    turns = {pair: _turn(pair, dataset, ids, count, work) for pair in names}
    winner, table = _faster(names, turns, backend)
    told = ", ".join(f"{table[_told(pair)] / TURN_STEPS / count:.3g} ms with {_told(pair)}" for pair in names)
    if winner != names[0]:  # against the plain pair alone, once more: one win may be the noise of a neighbour
        winner, again = _faster([names[0], winner], turns, backend)
        told += f"; again: {', '.join(f'{milliseconds / TURN_STEPS / count:.3g}' for milliseconds in again.values())}"
    return winner, f"{pace}; an image took {told}", table


def _faster(names: list[Pair], turns: Mapping[Pair, Turn], backend: Backend) -> tuple[Pair, Table]:
    """Return the pair that is clearly faster than the first, or the first, as rank 0 measured it; and all times."""
    _, table = fastest({_told(pair): turns[pair] for pair in names}, backend, rounds=2, budget_seconds=RACE_SECONDS)
    choice = torch.tensor([clear_winner([table[_told(pair)] for pair in names])], device=backend.device)
    backend.broadcast_([choice])
    return names[int(choice.item())], table


def _turn(pair: Pair, dataset: Dataset, ids: list[int], count: int, work: _Step) -> Turn:
    """Return a few steps of `count` images, loaded as the pair says.

    The worker makes one batch ahead: with more, it would be loading during the turn of another pair.
    """
    threads, workers = pair
    loader = LocalLoader(dataset, count, 1, 0, 1, workers, ahead=1)
    endless = torch.tensor(ids).repeat(-(-count * TURN_STEPS * 12 // len(ids)))
    batches = loader.epoch(Plan(endless, torch.ones(len(endless))), view=0)

    def turn() -> torch.Tensor:
        torch.set_num_threads(threads)
        losses = [work(next(batches)) for _ in range(TURN_STEPS)]
        return losses[-1]

    return turn


def _told(pair: Pair) -> str:
    threads, workers = pair
    return f"{workers} worker{'s' * (workers != 1)} + {threads} thread{'s' * (threads != 1)}"
