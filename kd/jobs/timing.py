"""Candidates, timed in turns: the fastest one, and by how much."""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from kd.setup.modes import Work

HOPELESS_SECONDS, HOPELESS_RATIO = 0.5, 4.0
"""A candidate drops out that takes longer than both: on a processor without bfloat16 units one step in it can take as
long as thirty others, and should run once only."""

Name = TypeVar("Name", bound=Hashable)  # of a candidate: a text, a number or an execution mode


def fastest(
    candidates: Mapping[Name, Work],
    rounds: int = 4,
    budget_seconds: float = 20.0,
    margin: float = 0.0,
    warm: bool = False,
) -> tuple[Name, dict[Name, float]]:
    """Return the name of the fastest candidate and the median milliseconds of each.

    The candidates run in turns, so that a busy neighbour slows them alike; the first round only warms up. One measured
    round is enough where the budget is spent. The first candidate is the plain one; another wins where it is faster by
    the share `margin` in all rounds but one. `warm` runs each once beforehand: what compiles in its first call would
    otherwise drop out.
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
            samples[name].append(seconds_of(candidates[name]))
        best = min(samples[name][-1] for name in racing)
        racing = [name for name in racing if samples[name][-1] < max(HOPELESS_SECONDS, HOPELESS_RATIO * best)]
        if turn > 0 and time.perf_counter() - start > budget_seconds:
            break
    measured = {name: times[1:] or times for name, times in samples.items()}
    medians = {name: round(1000 * statistics.median(times), 2) for name, times in measured.items()}
    return clear_winner(measured, margin), medians


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


def milliseconds(work: Work) -> float:
    """Return how long a piece of work takes, measured once after a warm-up."""
    work().sum().item()
    return 1000 * seconds_of(work)


def seconds_of(work: Work) -> float:
    """Return how long a piece of work takes, with waiting for the device."""
    before = time.perf_counter()
    work().sum().item()
    return time.perf_counter() - before
