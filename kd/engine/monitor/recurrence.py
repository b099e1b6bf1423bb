"""Find steps that are slow at a regular interval, and rule out chance."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

SLOW = 1.5
"""Least length of the slow steps, in lengths of the others. The slowest step of most
log windows of a healthy run is below it.
"""
# share of the recurring steps that are longer than the limit between the two lengths,
# and of the others that are shorter: "every 2nd step" is then true of most of them
REGULAR = 0.8
CHANCE = 1e-4
"""Largest probability that independent steps give such a recurrence. A live run is
judged 3,000 times a day, mostly on the same steps.
"""
MIN_REPEATS = 5  # in `LATEST` steps fewer cannot be rarer than `CHANCE`
# judged steps, the latest: periods up to 200. They take 0.1 s.
LATEST = 1000


class Recurrence(NamedTuple):
    """Steps that are slow at a regular interval."""

    period: int
    first: int  # position of the first slow step
    slow_ms: float  # medians of the slow steps and of the others
    usual_ms: float
    share: float  # of the time, that the slow steps take beyond the others' median
    chance: float  # upper bound of the probability in independent steps

    def excess(self, steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return how much longer the slow steps' median is, ms by span."""
        names = dict.fromkeys(chain(*steps))
        values = {name: [step.get(name, 0.0) for step in steps] for name in names}
        return {
            name: statistics.median(row[self.first :: self.period])
            - statistics.median(self._usual(row))
            for name, row in values.items()
        }

    def follows(self, happened: Sequence[bool]) -> bool:
        """Return whether the slow steps, and not the others, follow such steps."""
        before = [False, *happened[:-1]]
        after = before[self.first :: self.period][1:]
        otherwise = statistics.mean(self._usual(before))
        return sum(after) >= REGULAR * len(after) and otherwise <= 1 - REGULAR

    def since(self, count: int) -> int:
        """Return how many of `count` steps follow the last slow one."""
        return (count - 1 - self.first) % self.period

    def _usual(self, values: Sequence[float]) -> list[float]:
        return [
            value for i, value in enumerate(values) if i % self.period != self.first
        ]


def recurrence(lengths: Sequence[float]) -> Recurrence | None:
    """Return the recurrence that chance explains the least, or None.

    `lengths`: milliseconds of consecutive steps. The steps are counted that exceed the
    limit, the geometric mean of both medians. The tail of the hypergeometric
    distribution (Fisher's exact test) bounds the chance, with Bonferroni over periods,
    phases and limits.
    """
    skipped = max(0, len(lengths) - LATEST)
    latest = np.asarray(lengths[skipped:])
    periods = range(2, len(latest) // MIN_REPEATS + 1)
    candidates = [_recurrence(latest, period) for period in periods]
    likely = min(
        (each for each in candidates if each is not None and each.chance <= CHANCE),
        key=lambda each: each.chance,
        default=None,
    )
    if likely is None:
        return None
    return likely._replace(first=(likely.first + skipped) % likely.period)


def _recurrence(lengths: np.ndarray, period: int) -> Recurrence | None:
    unpaired = len(lengths) % period
    table = lengths[unpaired:].reshape(-1, period)
    phase = int(np.median(table, axis=0).argmax())
    slow = table[:, phase]
    usual = np.delete(table, phase, axis=1)
    slow_ms = float(np.median(slow))
    usual_ms = float(np.median(usual))
    if slow_ms < SLOW * usual_ms:
        return None
    limit = math.sqrt(slow_ms * usual_ms)
    hits = int((slow > limit).sum())
    misses = int((usual > limit).sum())
    if hits < REGULAR * slow.size or misses > (1 - REGULAR) * usual.size:
        return None
    tail = sum(
        math.comb(slow.size, count) * math.comb(usual.size, hits + misses - count)
        for count in range(hits, min(slow.size, hits + misses) + 1)
    )
    # pairs of period and phase, each with a limit that may lie between any two steps
    choices = len(lengths) ** 3 // (2 * MIN_REPEATS**2)
    chance = tail * choices / math.comb(table.size, hits + misses)
    share = slow.size * (slow_ms - usual_ms) / float(table.sum())
    first = (unpaired + phase) % period
    return Recurrence(period, first, slow_ms, usual_ms, share, chance)
