"""Was a student still learning when its run ended? A rule on its evaluations, of which
the last show the decay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

from kd.core.intervals import Z

EARLY, LATE = (0.20, 0.50), (0.60, 0.75)
"""Two parts of the run, as shares of its steps: after any warm-up, and before the last
quarter, in which a decaying learning rate raises each score once, whether the student
still learns or not. The first is long, since scores at a high rate scatter: labels
alone on ten classes, 200 images, had 41.5, 39, 40, 33 and 34 % in five evaluations in a
row, and from 35 % of the steps on they would have seemed to learn
(benchmarks/still_learning.py, labels, 3000 steps).
"""
FEWEST = 2  # evaluations in each part: one alone is often luck at a high learning rate
LONGER = 3
"""How many times longer a run is whose gain is foreseen: the accuracy of three students
of vit_food grew by 7 and 4 points from 8 to 16 and from 16 to 40 epochs
(`patience_*.csv`), at most with the logarithm of the steps.
"""
REACH = math.log(LONGER) / math.log(
    sum(LATE) / sum(EARLY)
)  # between the parts it grew as 1 / REACH of that gain


class Learning(NamedTuple):
    """Whether a student still learned at the end of its run, and why."""

    answer: str  # "learning", "stopped" or "unknown"
    reason: str


def learning(scores: Sequence[tuple[float, float]], images: int) -> Learning:
    """Compare the two parts of a run by a share, such as the accuracy.

    It still learned if a run `LONGER` times as long would gain more than the 95 %
    interval, by the growth between the parts; it had stopped if that gain is within one
    standard error. `scores`: (share of the run's steps, score), in order; `images`:
    validation images, 0: unknown.
    """
    parts = [
        [score for at, score in scores if low <= at <= high]
        for low, high in (EARLY, LATE)
    ]
    if min(map(len, parts)) < FEWEST:
        return Learning(
            "unknown", f"{len(scores)} evaluations are too few, ten are always enough"
        )
    if not images:
        return Learning("unknown", "the number of validation images is not recorded")
    before, after = map(mean, parts)
    error = math.sqrt(after * (1 - after) / images)
    gain = REACH * (after - before)
    reason = (
        f"{100 * (after - before):+.1f} points from before the middle of its steps to"
        " after it"
    )
    if error < gain <= Z * error:
        return Learning(
            "unknown", f"{reason}, too little for {images:,} validation images"
        )
    return Learning("learning" if gain > error else "stopped", reason)
