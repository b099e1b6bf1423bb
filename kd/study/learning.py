"""Judge by its evaluations whether a student still learned when its run ended.

The last ones show the decay of the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

from kd.core.intervals import Z

EARLY = (0.20, 0.50)
"""The early interval of a run, as shares of its steps, which begins after any warm-up.

It is long, since scores at a high rate scatter: labels alone on ten classes, 200
images, had 41.5, 39, 40, 33 and 34 % in five evaluations in a row, and from 35 % of the
steps on they would have seemed to learn (benchmarks/still_learning.py, labels, 3000
steps).
"""
LATE = (0.60, 0.75)
"""The late interval, which ends before the last quarter.

There a decaying learning rate raises each score once, whether the student still learns
or not.
"""
# evaluations in each interval: one alone is often luck at a high learning rate
FEWEST = 2
LONGER = 3
"""How many times longer a run is whose gain is foreseen.

The accuracy of three students of vit_food grew by 7 and 4 points from 8 to 16 and from
16 to 40 epochs (`patience_*.csv`), at most with the logarithm of the steps.
"""
# between the intervals a score grew by 1 / REACH of that gain
REACH = math.log(LONGER) / math.log(sum(LATE) / sum(EARLY))


class Learning(NamedTuple):
    """Whether a student still learned at the end of its run, and why."""

    answer: str  # "learning", "stopped" or "unknown"
    reason: str


def judge_learning(scores: Sequence[tuple[float, float]], images: int) -> Learning:
    """Compare the two intervals of a run by a share, such as the accuracy.

    It still learned if a run `LONGER` times as long would gain more than the 95 %
    interval, by the growth between them; it had stopped if that gain is within one
    standard error. `scores`: (share of the run's steps, score), in order; `images`:
    validation images, 0: unknown.
    """
    early = _scores_within(scores, *EARLY)
    late = _scores_within(scores, *LATE)
    if min(len(early), len(late)) < FEWEST:
        return Learning(
            "unknown", f"{len(scores)} evaluations are too few, ten are always enough"
        )
    if not images:
        return Learning("unknown", "the number of validation images is not recorded")
    after = mean(late)
    growth = after - mean(early)
    error = math.sqrt(after * (1 - after) / images)
    gain = REACH * growth
    reason = (
        f"{100 * growth:+.1f} points from before the middle of its steps to after it"
    )
    if error < gain <= Z * error:
        return Learning(
            "unknown", f"{reason}, too little for {images:,} validation images"
        )
    return Learning("learning" if gain > error else "stopped", reason)


def _scores_within(
    scores: Sequence[tuple[float, float]], low: float, high: float
) -> list[float]:
    return [score for share, score in scores if low <= share <= high]
