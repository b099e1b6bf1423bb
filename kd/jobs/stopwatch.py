"""Time pieces of work in this process, per image."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from kd.core.contracts import Dataset
from kd.core.errors import CorruptImage, DataError
from kd.core.seeds import evenly_spaced
from kd.setup.modes import Work

FEWEST = 2  # images of the smallest trial: batch norm needs them
TRIAL_SECONDS = 2.0
"""Seconds in which a part of a run is timed. On a CPU `FEWEST` images come first; they
have a step's whole overhead, so that a larger trial never takes longer than expected
from them.
"""
ROUNDS = 5  # most times that a part is timed
LOADED = 16  # images for timing loading: the median of as many varied by a few percent


class Timing(NamedTuple):
    """Means for one image of some work."""

    ms: float = 0.0  # milliseconds
    cpu_ms: float = 0.0  # of all cores
    images: int = 0  # of the trial; 0: not timed


def time_work(make: Callable[[int], Work], largest: int, images: int) -> Timing:
    """Time work on `largest` images, or on as many as `TRIAL_SECONDS` surely allow.

    `images` are tried first.
    """
    work = make(images)
    work().sum().item()  # one-time set-up is not measured
    expected = min(largest, int(images * TRIAL_SECONDS / seconds_of(work)))
    if expected > 1.5 * images:
        return time_work(make, largest, expected)
    start = time.perf_counter()
    cpu_start = time.process_time()
    rounds = 0
    while rounds < ROUNDS and time.perf_counter() - start < TRIAL_SECONDS:
        work().sum().item()
        rounds += 1
    thousands = rounds * images / 1000
    return Timing(
        (time.perf_counter() - start) / thousands,
        (time.process_time() - cpu_start) / thousands,
        images,
    )


def time_loading(dataset: Dataset) -> Timing:
    """Time loading in this process; `Timing()` if the images do not exist yet."""

    def readable(id: int) -> bool:
        try:
            return dataset.load(id, 0).readable
        except CorruptImage:  # data.on_corrupt decides in the run
            return False

    ids = evenly_spaced(len(dataset), LOADED)
    try:
        return time_work(
            lambda images: lambda: torch.tensor([readable(id) for id in ids[:images]]),
            len(ids),
            1,
        )
    except DataError:
        return Timing()


def seconds_of(work: Work) -> float:
    """Return the time of some work, including the device sync."""
    before = time.perf_counter()
    work().sum().item()
    return time.perf_counter() - before
