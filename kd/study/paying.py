"""Compare a student with the same one on labels alone, over their total cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from kd.study.learning import Learning, judge_learning
from kd.study.report.record import RunRecord, spent_of, total

# validation score of each evaluation by cost, in the unit of `RunRecord.spent`
Curve = Mapping[float, float]

# smallest share of the cost that labels alone must have had: CPU times vary by a few
# percent
ENOUGH = 0.9
AIM = 1.1
"""Cost of labels alone that is aimed at, as a share of the cost of distilling.

Eleven checks of two runs, on a loaded machine, told 0.97 to 1.13 times the steps that
took as much. A verdict needs `ENOUGH`, so a length suffices where the estimate is up to
18 % too small.
"""
ROWS = 6  # of the table in a terminal


class Arms(NamedTuple):
    """The validation scores of both arms over their total cost."""

    distilled: Curve  # the teacher's fit and stored outputs come before its first point
    alone: Curve

    @classmethod
    def of(cls, run: RunRecord) -> Arms | None:
        """Return the arms of a run; None without a baseline or recorded costs."""
        before = total((run.fitting_spent, run.at_hand))
        if run.baseline is None or before is None:
            return None
        arms = cls(curve_of(run, before), curve_of(run.baseline, 0.0))
        return arms if all(arms) else None

    @property
    def best(self) -> float:
        """The best score of labels alone, which is held level from their end on."""
        return best_of(self.alone)

    @property
    def end(self) -> float:
        """The cost of the longer arm."""
        return max(*self.distilled, *self.alone)

    @property
    def pays_from(self) -> float:
        """The cost from which on the distilled student stays above `best`.

        It is at most the student's own.
        """
        no_better = max(
            (cost for cost, score in self.distilled.items() if score <= self.best),
            default=0.0,
        )
        return min(
            (cost for cost in self.distilled if cost > no_better),
            default=max(self.distilled),
        )

    def table(self) -> list[tuple[float, ...]]:
        """Return a few costs up to the end with the best score of each arm so far.

        A score is NaN before the arm's first one.
        """
        costs = [self.end * number / ROWS for number in range(1, ROWS + 1)]
        return [
            (cost, best_of(self.distilled, cost), best_of(self.alone, cost))
            for cost in costs
        ]


def best_of(curve: Curve, cost: float = math.inf) -> float:
    """Return the best score for at most a cost; NaN without one."""
    return max(
        (
            score
            for spent, score in curve.items()
            if spent <= cost or math.isclose(spent, cost)
        ),
        default=math.nan,
    )


def curve_of(run: RunRecord, before: float) -> dict[float, float]:
    """Return a run's scores over its cost, which a cost `before` precedes.

    The curve is empty if no cost is recorded.
    """
    # a log window ends at an evaluation
    costs = {row["step"]: spent_of([row], run.manifest) for row in run.train}
    curve = {}
    for row in run.val:
        cost = costs.get(row["step"])
        if cost is not None:
            curve[before + cost] = float(row[run.selection_metric.key])
    return curve


def has_stopped(curve: Curve) -> bool:
    """Return whether half of the evaluations, and several, brought no new best."""
    scores = [*curve.values()]
    return len(scores) - 1 - scores.index(max(scores)) >= patience_of(len(scores))


LEAST = 5
"""Fewest evaluations without a new best that end labels alone: half of a few is chance.

Half of twenty would have ended one of three measured arms after 14, at no loss of its
best score; five were too few in a fit on labels, whose accuracy stood below 72.0 % for
five evaluations and rose to 76.5 % (benchmarks/still_learning.py, column `cut`).
"""


def patience_of(evaluations: int) -> int:
    """Return the evaluations in a row without a new best that end labels alone."""
    return max(LEAST, math.ceil(evaluations / 2))


def baseline_length(run: RunRecord) -> dict[str, int]:
    """Return `run.steps` and `run.patience` of labels alone, for a finished run.

    The arm gets what distilling cost in all. The arm is an instrument, not the product,
    so a stopwatch may set its length.
    """
    cost = run.spent_in_all
    step_cost = cost_of_step(run)
    steps = run.steps
    if cost and step_cost:
        steps = max(steps, math.ceil(AIM * cost / step_cost))
    return {"steps": steps, "patience": patience_of(len(run.val))}


def cost_of_step(run: RunRecord) -> float | None:
    """Return the cost of a step of the student without its teacher.

    It is in the unit of `RunRecord.spent`; None: unknown. The first log window, whose
    steps warm up, counts only if there is no other.
    """
    rows = run.train[1:] or run.train
    if not rows or run.spent is None:
        return None
    warm_up = run.train[:-1][:1]
    teacher_ms = sum(row.get("ms_teacher", 0.0) for row in rows)
    total_ms = sum(
        value for row in rows for name, value in row.items() if name.startswith("ms_")
    )
    student_share = 1 - teacher_ms / total_ms if total_ms else 1.0
    cost = run.spent - (spent_of(warm_up, run.manifest) or 0.0)
    steps = run.steps - sum(row["step"] for row in warm_up)
    return cost * student_share / steps


def judge_run(run: RunRecord) -> Learning:
    """Return whether the student of a finished run still learned."""
    if run.gave_up:
        return Learning(
            "stopped", f"{run.keys['run.patience']} evaluations in a row were no better"
        )
    column = run.selection_metric
    scores = [(row["step"] / run.steps, float(row[column.key])) for row in run.val]
    images = run.manifest.get("validation_images", 0) if column.unit == "%" else 0
    return judge_learning(scores, images)
