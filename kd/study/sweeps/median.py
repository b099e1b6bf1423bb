"""Which trials are hopeless: the median rule at equal steps.

The rule is that of Golovin et al. (Google Vizier, KDD 2017, section 3.2.2), with a trial's best score up to a step on
both sides. A trial is compared with those before it alone, so that which ones end depends on their curves and neither
on how many train at a time nor on when a process was killed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Sequence
from dataclasses import dataclass

BEGIN = 1 / 3
"""Share of its run from which a trial may end."""
LEAST = 3
"""Other trials that make a median."""


@dataclass(frozen=True, slots=True)
class Point:
    """An evaluation of a trial."""

    step: int
    share: float
    """Of the run that was done, 0 to 1."""
    score: float
    """Of the checkpoint that was the best until then."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rule says of a trial."""

    until: float
    """The last step of which it is known what the rule says; infinite where nothing is open."""
    end: Point | None = None
    """The evaluation at which the trial ends as hopeless."""
    median: float = 0.0
    """Of the others at that step."""


def judge(
    curves: Sequence[Sequence[Point]], ended: Sequence[bool], recorded: Container[int] = (), smaller: bool = False
) -> list[Verdict]:
    """Return the verdict on each trial, from the curves as far as they are known; `smaller`: smaller is better.

    The curves of trials whose positions are `recorded` end where they were stopped; nothing is open there.
    """
    earlier: list[tuple[dict[int, float], Verdict]] = []
    for i, (curve, done) in enumerate(zip(curves, ended, strict=True)):
        verdict = Verdict(math.inf) if i in recorded else _verdict(curve, done, earlier, smaller)
        last = math.inf if verdict.end is None else verdict.end.step
        earlier.append(({point.step: point.score for point in curve if point.step <= last}, verdict))
    return [verdict for _, verdict in earlier]


def _verdict(
    curve: Sequence[Point], done: bool, earlier: Sequence[tuple[dict[int, float], Verdict]], smaller: bool
) -> Verdict:
    until = 0.0
    for point in curve:
        if BEGIN <= point.share < 1:
            if any(verdict.end is None and verdict.until < point.step for _, verdict in earlier):
                return Verdict(until)
            others = [scores[point.step] for scores, _ in earlier if point.step in scores]
            if len(others) >= LEAST:
                middle = statistics.median(others)
                if (point.score > middle) if smaller else (point.score < middle):
                    return Verdict(math.inf, point, middle)
        until = float(point.step)
    return Verdict(math.inf if done else until)
