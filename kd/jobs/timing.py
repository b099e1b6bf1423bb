"""Time pieces of work in this process: per image, and candidates against each other."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from kd.core.contracts import Dataset
from kd.core.errors import CorruptImage, DataError
from kd.core.seeds import evenly_spaced
from kd.setup.modes import Work

FEWEST = 2  # images of the smallest trial: batch norm needs them
TRIAL_SECONDS, ROUNDS = 3.0, 5
"""Seconds in which a part of a run is timed, and most times. On a CPU `FEWEST` images come first. They have a step's
whole overhead, so their time per image is too long, and a trial of more takes at most this time."""
COMPARED_SECONDS, COMPARED_ROUNDS = 20.0, 4  # the same for candidates, in turns
LOADED, LOADED_SECONDS = 16, 1.0
"""Images for timing loading, and seconds after which fewer are enough: their median varies by a few percent."""
Name = TypeVar("Name", bound=Hashable)  # name of a candidate: a text, a number or an execution mode


class Timed(NamedTuple):
    """Medians for one image of some work."""

    ms: float = 0.0  # wall-clock time
    cost: float = 0.0  # milliseconds as a verdict counts them: of all cores on a CPU, else wall-clock time
    images: int = 0  # of the trial; 0: not timed


def timed(make: Callable[[int], Work], most: int, on_cpu: bool) -> Timed:
    """Time the work made for `most` images, or on a CPU for as many as `TRIAL_SECONDS` surely allow."""
    images = min(FEWEST, most) if on_cpu else most
    while True:
        work = make(images)
        work().sum().item()  # one-time set-up is not measured
        samples = [_sample(work, on_cpu)]
        wanted = min(most, 8 * images, int(images * TRIAL_SECONDS / max(samples[0][0], 1e-9)))
        if images == most or wanted < min(most, 2 * images):
            break
        images = wanted
    while len(samples) < ROUNDS and sum(seconds for seconds, _ in samples) < TRIAL_SECONDS:
        samples.append(_sample(work, on_cpu))
    ms, cost = (1000 * statistics.median(seconds) / images for seconds in zip(*samples, strict=True))
    return Timed(ms, cost, images)


def _sample(work: Work, on_cpu: bool) -> tuple[float, float]:
    spent = time.process_time()
    seconds = seconds_of(work)
    return seconds, time.process_time() - spent if on_cpu else seconds


def loading(dataset: Dataset) -> Timed:
    """Time loading in this process, on one core; `Timed()` if no image can be read."""
    start, times = time.perf_counter(), []
    for id in evenly_spaced(len(dataset), LOADED):
        try:
            if not dataset.load(id, 0).readable:
                continue
            before = time.perf_counter()
            dataset.load(id, 0)
        except CorruptImage:
            continue  # data.on_corrupt decides in the run
        except DataError:  # not rendered or unpacked yet
            return Timed()
        times.append(1000 * (time.perf_counter() - before))
        if time.perf_counter() - start > LOADED_SECONDS and len(times) > 2:
            break
    ms = statistics.median(times or [0.0])
    return Timed(ms, ms, 1)


def fastest(candidates: Mapping[Name, Work], margin: float) -> tuple[Name, dict[Name, float]]:
    """Time candidates after a warm-up of each; return the name of the fastest and all median milliseconds.

    The candidates run in turns, so other load slows them alike; rounds end when the budget is spent. The first
    candidate is the baseline; another wins if it is faster by the share `margin` in all rounds but one.
    """
    names = list(candidates)
    if len(names) == 1:
        return names[0], {}
    samples: dict[Name, list[float]] = {name: [] for name in names}
    for work in candidates.values():
        work().sum().item()  # one-time set-up is not measured
    start = time.perf_counter()
    for _ in range(COMPARED_ROUNDS):
        for name in names:
            samples[name].append(seconds_of(candidates[name]))
        if time.perf_counter() - start > COMPARED_SECONDS:
            break
    medians = {name: round(1000 * statistics.median(times), 2) for name, times in samples.items()}
    return clear_winner(samples, margin), medians


def clear_winner(rounds: Mapping[Name, Sequence[float]], margin: float) -> Name:
    """Return the fastest candidate that beats the first by `margin` in all rounds but one; else the first."""
    plain = next(iter(rounds))
    shares = {}
    for name, times in rounds.items():
        shares[name] = sorted(mine / its for mine, its in zip(times, rounds[plain], strict=False))
        del shares[name][max(2, len(shares[name]) - 1) :]  # other load may have disturbed one round
    best = min(shares, key=lambda name: shares[name][-1])
    return best if shares[best][-1] <= 1 - margin else plain


def seconds_of(work: Work) -> float:
    """Return the time of some work, including the device sync."""
    before = time.perf_counter()
    work().sum().item()
    return time.perf_counter() - before
