"""How many threads a step on a CPU gets: measured on real steps while the run goes on.

All of a rank's cores is the plain rule. Beside a busy neighbour it can be three times slower than half of them, because
each parallel operation waits for its slowest thread. No work before the run can tell, since neighbours come and go. A
small model gains nothing by a second thread and has only that risk, so threads that do not pay are given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kd.core.contracts import Backend
from kd.core.types import State

EVERY = 500
"""Steps from one comparison to the next: its slower half then costs under 2 % of the time where it is half as fast."""
SHORTEST = 100
"""Steps of a run that is long enough for a comparison."""


@dataclass(frozen=True)
class Look:
    """A comparison of two numbers of threads in steps whose numbers are fixed."""

    begin: int
    """The first step whose threads it sets."""
    pairs: int
    """Of steps, one with each number."""
    spoilt: int
    """Pairs that may say otherwise, for example because of an evaluation."""
    more: float
    """How many times as fast a step must be with more threads than those in use, in all pairs that count."""
    fewer: float
    """The same for fewer threads; below 1, threads that gain nothing are given up."""
    apart: int = 0
    """Steps between its first and its second half: other work that comes in a burst spoils one of them, not both."""

    @property
    def length(self) -> int:
        """Steps from its first to its last."""
        return 2 * self.pairs + self.apart

    def compares(self, turn: int) -> bool:
        """Return whether the step with this number, counted from its begin, belongs to one of its halves."""
        return 0 <= turn < self.pairs or self.pairs + self.apart <= turn < self.length


QUICK = Look(begin=2, pairs=2, spoilt=0, more=1.5, fewer=1.5)
"""At the start of a run. Its two pairs find only what nobody may wait for: a neighbour that halves the speed."""
FULL = Look(begin=16, pairs=8, spoilt=2, more=1.1, fewer=0.95, apart=24)
"""After workers have filled their queues, and then every `EVERY` steps. It takes back what a burst made of `QUICK`."""


class Threads:
    """Set torch's threads before each step, and compare two numbers of them now and then.

    The candidates are all cores of the rank, half of them, a quarter, ... 1. A comparison is between the number in use
    and one of its neighbours, in alternating steps whose numbers are fixed. All ranks decide by their mean, so that
    they alternate alike. Which steps try another number does not depend on the clock: two runs that decide alike, and a
    resumed one, have the same bits.
    """

    def __init__(self, backend: Backend, most: int, info: Callable[[str], None]) -> None:
        """Prepare to choose."""
        self.backend, self.most, self.info, self.look = backend, most, info, QUICK
        self._seconds: list[float] = []
        self._clock = 0.0

    def __call__(self, state: State) -> State:
        """Set the threads of the step that comes next, and return the state with the number in use."""
        now = time.perf_counter()
        current = state.threads or self.most
        while state.step > self.look.begin + self.look.length:  # a resumed run
            self.look = self._next()
        turn = state.step - self.look.begin
        if self.look.compares(turn - 1):
            self._seconds.append(now - self._clock)
        if turn == self.look.length:
            current = self._decide(current, self._other(current))
            turn = state.step - self.look.begin
        self._clock = now
        trying = self.look.compares(turn) and turn % 4 in (1, 2)  # A B B A: a drift counts for neither
        wanted = self._other(current) if trying else current
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)
        return replace(state, threads=current)

    def _next(self) -> Look:
        """Return the comparison after this one."""
        if self.look.pairs == QUICK.pairs:
            return replace(FULL, begin=max(FULL.begin, self.look.begin + self.look.length))
        return replace(FULL, begin=(self.look.begin // EVERY + 1) * EVERY)

    def _other(self, current: int) -> int:
        """Return the candidate to compare with: half of the cores in use, or at every second look twice as many."""
        double = min(self.most, 2 * current)
        up = current == 1 or (current < self.most and self.look.begin // EVERY % 2 == 1)
        return double if up else max(1, current // 2)

    def _decide(self, current: int, other: int) -> int:
        """Return the number that the pairs speak for, and set when the next comparison begins."""
        look, seconds, self._seconds = self.look, self._seconds, []
        self.look = self._next()
        # A resumed run has not seen all pairs; then, as on a tie, nothing changes.
        ratios = [0.0] * look.pairs
        if len(seconds) == 2 * look.pairs:
            pairs = [seconds[i : i + 2] for i in range(0, 2 * look.pairs, 2)]
            # A B B A: in odd pairs the number in use came second
            ratios = sorted(pair[i % 2] / pair[1 - i % 2] for i, pair in enumerate(pairs))
        ratio = float(self.backend.reduce_mean(torch.tensor(ratios[look.spoilt], device=self.backend.device)))
        if ratio < (look.more if other > current else look.fewer):
            return current
        if 1 < other < self.most:
            self.look = replace(look, begin=look.begin + look.length)  # at once the next candidate
        gain = f"a step is {ratio:.1f} times as fast" if ratio >= FULL.more else "more gain too little"
        self.info(f"threads: {other} instead of {current}, {gain}")
        return other
