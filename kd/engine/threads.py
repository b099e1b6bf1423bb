"""How many threads a step on a CPU gets: measured on real steps while the run goes on.

All of a rank's cores is the plain rule. Beside a busy neighbour it can be three times slower than half of them, because
each parallel operation waits for its slowest thread. No work before the run can tell, since neighbours come and go.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from kd.contracts import Backend
from kd.types import State

PAIRS, SPOILT = 8, 2
"""Pairs of steps of a comparison, and how many may be spoilt, for example by an evaluation, and are left out."""
APART = 24
"""Steps between its first and its second half: other work that comes in a burst spoils one of them, not both."""
LENGTH = 2 * PAIRS + APART
"""Steps of a comparison."""
MARGIN = 0.1
"""Share by which a step must be faster with another number of threads, in all pairs that count."""
FIRST = 16
"""The step before which the first comparison begins; during the steps before, workers fill their queues."""
EVERY = 500
"""Steps from one comparison to the next: its slower half then costs under 1 % of the time."""
SHORTEST = 100
"""Steps of a run that is long enough for a comparison."""


class Threads:
    """Set torch's threads before each step, and compare two numbers of them now and then.

    The candidates are all cores of the rank, half of them, a quarter, ... 1. A comparison is between the number in use
    and one of its neighbours, in alternating steps whose numbers are fixed. All ranks decide by their mean, so that
    they alternate alike. Where the plain number wins, which steps had which number does not depend on the clock: two
    runs and a resumed one have the same bits.
    """

    def __init__(self, backend: Backend, most: int, info: Callable[[str], None], first: int = FIRST) -> None:
        """Prepare to choose.

        Args:
            backend: for the mean over the ranks.
            most: cores of this rank.
            info: shows a line where the number changes.
            first: the step before which the first comparison begins.
        """
        self.backend, self.most, self.info, self.begin = backend, most, info, first
        self._seconds: list[float] = []
        self._clock = 0.0

    def __call__(self, state: State) -> State:
        """Set the threads of the step that comes next, and return the state with the number in use."""
        now = time.perf_counter()
        current = state.threads or self.most
        while state.step > self.begin + LENGTH:  # a resumed run
            self.begin = self._next(self.begin)
        turn = state.step - self.begin
        if compared(turn - 1):
            self._seconds.append(now - self._clock)
        if turn == LENGTH:
            current = self._decide(current, self._other(current))
            turn = state.step - self.begin
        self._clock = now
        trying = compared(turn) and turn % 4 in (1, 2)  # A B B A: a drift counts for neither
        torch.set_num_threads(self._other(current) if trying else current)
        return replace(state, threads=current)

    def _next(self, begin: int) -> int:
        return (begin // EVERY + 1) * EVERY

    def _other(self, current: int) -> int:
        """Return the candidate to compare with: half of the cores in use, or at every second look twice as many."""
        double = min(self.most, 2 * current)
        up = current == 1 or (current < self.most and self.begin // EVERY % 2 == 1)
        return double if up else max(1, current // 2)

    def _decide(self, current: int, other: int) -> int:
        """Return the number that the pairs speak for, and set when the next comparison begins."""
        begin, seconds, self._seconds = self.begin, self._seconds, []
        self.begin = self._next(begin)
        # A resumed run has not seen all pairs; then, as on a tie, nothing changes.
        ratios = [0.0] * PAIRS
        if len(seconds) == 2 * PAIRS:
            pairs = [sorted_pair(seconds[i : i + 2], i // 2) for i in range(0, 2 * PAIRS, 2)]
            ratios = sorted(mine / its for mine, its in pairs)
        ratio = float(self.backend.reduce_mean(torch.tensor(ratios[SPOILT], device=self.backend.device)))
        if ratio < 1 + MARGIN:
            return current
        if 1 < other < self.most:
            self.begin = begin + LENGTH  # at once the next candidate
        self.info(f"threads: {other} instead of {current}, a step is {ratio:.1f} times as fast")
        return other


def compared(turn: int) -> bool:
    """Return whether the step with this number within a comparison belongs to one of its halves."""
    return 0 <= turn < PAIRS or PAIRS + APART <= turn < LENGTH


def sorted_pair(seconds: list[float], index: int) -> tuple[float, float]:
    """Return the seconds of a pair with the number in use first; odd pairs are measured the other way round."""
    first, second = seconds
    return (second, first) if index % 2 else (first, second)
