"""Time pieces of work in this process: per image, and candidates against each other."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, TypeVar

import torch

from kd.core.contracts import Dataset
from kd.core.errors import CorruptImage, DataError
from kd.core.seeds import evenly_spaced
from kd.setup.modes import Work

FEWEST = 2  # images of the smallest trial: batch norm needs them
TRIAL_SECONDS, ROUNDS = 2.0, 5
"""Seconds in which a part of a run is timed, and most times. On a CPU `FEWEST` images come first; they have a step's
whole overhead, so that a larger trial never takes longer than expected from them."""
COMPARED_SECONDS, COMPARED_ROUNDS = 10.0, 8  # the same for candidates, in turns
MARGIN = 0.05
"""Share of the time that a candidate must save in all rounds but one: less is noise on a shared machine."""
LOADED = 16  # images for timing loading: the median of as many varied by a few percent

Name = TypeVar("Name", bound=Hashable)  # name of a candidate: a text, a number or an execution mode


class Timed(NamedTuple):
    """Means for one image of some work."""

    ms: float = 0.0  # milliseconds
    cpu_ms: float = 0.0  # of all cores
    images: int = 0  # of the trial; 0: not timed


def timed(make: Callable[[int], Work], most: int, images: int) -> Timed:
    """Time the work made for `most` images, or for as many as `TRIAL_SECONDS` surely allow; try `images` first."""
    work, rounds = make(images), 0
    work().sum().item()  # one-time set-up is not measured
    larger = min(most, int(images * TRIAL_SECONDS / seconds_of(work)))
    if larger > 1.5 * images:
        return timed(make, most, larger)
    start, spent = time.perf_counter(), time.process_time()
    while rounds < ROUNDS and time.perf_counter() - start < TRIAL_SECONDS:
        work().sum().item()
        rounds += 1
    thousands = rounds * images / 1000
    return Timed((time.perf_counter() - start) / thousands, (time.process_time() - spent) / thousands, images)


def loading(dataset: Dataset) -> Timed:
    """Time loading in this process; `Timed()` if the images do not exist yet."""

    def readable(id: int) -> bool:
        try:
            return dataset.load(id, 0).readable
        except CorruptImage:  # data.on_corrupt decides in the run
            return False

    ids = evenly_spaced(len(dataset), LOADED)
    try:
        return timed(lambda images: lambda: torch.tensor([readable(id) for id in ids[:images]]), len(ids), 1)
    except DataError:
        return Timed()


def fastest(candidates: Mapping[Name, Work]) -> tuple[Name, float]:
    """Time candidates in turns, so that other load slows them alike, after a warm-up of each.

    Return the one that is the fastest by `MARGIN` in all rounds but one, which other load may have disturbed,
    and how many times as fast as the first it is in those; else (first, 1).
    """
    plain, *others = candidates
    if not others:
        return plain, 1.0
    for work in candidates.values():
        work().sum().item()  # one-time set-up is not measured
    start, rounds = time.perf_counter(), list[dict[Name, float]]()
    while len(rounds) < COMPARED_ROUNDS and time.perf_counter() - start <= COMPARED_SECONDS:
        rounds.append({name: seconds_of(work) for name, work in candidates.items()})
    shares = {
        name: sorted(seconds[name] / seconds[plain] for seconds in rounds)[: max(2, len(rounds) - 1)] for name in others
    }
    best = min(others, key=lambda name: shares[name][-1])
    return (best, 1 / shares[best][-1]) if shares[best][-1] <= 1 - MARGIN else (plain, 1.0)


def seconds_of(work: Work) -> float:
    """Return the time of some work, including the device sync."""
    before = time.perf_counter()
    work().sum().item()
    return time.perf_counter() - before
