"""`data.workers: auto` on a CPU: one worker or none, whichever real batches show to be faster.

A worker hides reading and decoding behind the step, but takes part of a core from it. Which of the two counts for more
depends on the images, the model and the neighbours. The batches are the same, so it may change at any step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from kd.data.loader import LocalLoader
from kd.types import Batch, Loading, Plan

SETTLE, MEASURED = 4, 8
"""Batches of a segment that are not measured, since the worker makes them ahead, and those that are."""
TURNS = (0, 1, 1, 0) * 4
"""Segments of a comparison: the loader in use, the other one twice, and the first again, four times."""
MARGIN, NEEDED = 0.05, 5
"""Share by which the other loader must be faster, and in how many of the eight pairs of neighbouring segments. Steps on
two cores swing by half: of fewer segments, noise hides a gain of a tenth."""
FIRST = 60
"""Steps before the first comparison; threads are compared before."""
SHORTEST = 400
"""Steps of a run that is long enough for a comparison."""
EVERY = 2048
"""Batches from one comparison to the next; half of 192 then come from the slower loader."""


class AutoWorkers:
    """Change between two loaders of the same batches. See `kd.contracts.Loader`."""

    def __init__(self, rule: LocalLoader, other: LocalLoader, info: Callable[[str], None]) -> None:
        """Begin with the plain rule's loader.

        Args:
            rule: with the number of workers of the plain rule.
            other: the same batches with another number.
            info: shows a line where the number changes.
        """
        self.loaders, self.info = [rule, other], info
        self.unreadable = other.unreadable = rule.unreadable
        self.batch_size = rule.batch_size
        self._batches = -FIRST * rule.accumulate
        """Since the comparison began; below 0 before it."""
        self._seconds: list[float] = []
        self._means: list[float] = []
        """Seconds of a batch in each segment so far. Not medians: a loader that is late makes a few batches late."""

    @property
    def workers(self) -> int:
        """Of the loader in use."""
        return self.loaders[0].workers

    @property
    def loading(self) -> Loading:
        """Of all batches so far."""
        return self.loaders[0].loading.plus(self.loaders[1].loading)

    def epoch(self, plan: Plan, view: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's micro-batches of the steps from `start` on."""
        size, accumulate = self.batch_size, self.loaders[0].accumulate
        end = len(plan.ids) // size
        while start < end:
            index, left = self._segment()
            stop = min(end, start - (-left // accumulate))
            part = replace(plan, ids=plan.ids[: stop * size], weights=plan.weights[: stop * size])
            yield from self._measured(self.loaders[index].epoch(part, view, start))
            start = stop

    def _segment(self) -> tuple[int, int]:
        """Return which loader is to be asked, and for how many batches at most."""
        if self._batches < 0:
            return 0, -self._batches
        turn, done = divmod(self._batches, SETTLE + MEASURED)
        return TURNS[turn], SETTLE + MEASURED - done

    def _measured(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Pass batches on and take the time from one to the next, the work of whoever asked for them included."""
        clock = time.perf_counter()
        for number, batch in enumerate(batches):
            now = time.perf_counter()
            if self._batches >= 0 and number >= SETTLE:
                self._seconds.append(now - clock)
            clock = now
            yield batch
            self._batches += 1
        if self._seconds and self._batches % (SETTLE + MEASURED) == 0:
            self._means.append(statistics.mean(self._seconds))
            self._seconds = []
        if self._batches == len(TURNS) * (SETTLE + MEASURED):
            self._decide()

    def _decide(self) -> None:
        """Exchange the loaders where the other was clearly faster, and set when to look again."""
        self._batches = -EVERY
        if len(self._means) == len(TURNS):
            pairs = zip(self._means[::2], self._means[1::2], TURNS[::2], strict=True)
            gains = sorted(second / first if turn else first / second for first, second, turn in pairs)
            if gains[-NEEDED] >= 1 + MARGIN:
                self.loaders.reverse()
                self.info(f"data.workers: {self.workers} from here on, {statistics.median(gains):.1f} times as fast")
        self._means = []
