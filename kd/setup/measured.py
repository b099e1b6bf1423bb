"""Measured runs of distilled students, and of students on labels alone.

They tell the accuracy by images, labels, views and epochs.

curves.csv has a row for each run of `benchmarks/curves.py`; a test compares it with the
file of that study.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from kd.core.text import format_seconds, percent

FILE = Path(__file__).with_name("curves.csv")
NEAR = 4.0
"""Largest factor between the pictures, and between the labels per class, of a run and
of comparable measured runs. A judgement: the set-ups of the study are about that far
from one another.
"""
# largest factor between the length or the views of a run and those of a row that stands
# for it
SIMILAR = 2.0


FEW_LABELS = (7.1, 20.5)
"""Smallest and largest gain of single runs over labels alone with the same seed,
points: all runs of docs/does-it-help.md with 10 to 400 labels per class and at least
nine of ten pictures without. A test recomputes them. A run's own student, teacher and
steps are not among the conditions, so there is only a range.
"""
OTHERS = (-13.9, 8.1)  # the same of all other runs of that page
EXPECTED = (
    "of all, measured against labels alone, {:+.1f} to {:+.1f} points with few labels"
    " and many pictures without, {:+.1f} to {:+.1f} on other data; students, teachers"
    " and steps differ from yours (docs/does-it-help.md)"
).format(*FEW_LABELS, *OTHERS)


@dataclass(frozen=True, slots=True)
class Measured:
    """Hold one measured run."""

    title: str  # the pictures in words
    pictures: int  # training images
    labelled: int  # of these
    classes: int
    teacher: float  # its accuracy on the test images; 0 on labels alone
    # "softmax", or "sigmoid" for sets of labels; the accuracy is then the mAP
    task: str
    student: str
    pretrained: bool  # whether the student started from pretrained weights
    arm: str  # "distilled" or "labels"
    views: int  # stored views per image; 0: fresh ones
    epochs: float
    other: str  # further keys that differ from the configuration that kd-init writes
    accuracy: float
    seconds: float  # CPU seconds, with the teacher's fit and outputs
    before: float  # of these, before the student's first step
    # CPU seconds of the student, and validation accuracy
    curve: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Situation:
    """Decide which measured runs a run may be compared with."""

    pictures: int
    labelled: int
    classes: int
    pretrained: bool  # the student's initial weights
    task: str = "softmax"

    def distance(self, row: Measured) -> float:
        """Return how far a measured run is, as a sum of logarithms.

        It is infinite if the run is not comparable.
        """
        few = self.labelled < self.pictures / 2
        row_few = row.labelled < row.pictures / 2
        if (row.pretrained, row.task, row_few) != (self.pretrained, self.task, few):
            return math.inf
        distances = [
            log_ratio(self.pictures, row.pictures),
            log_ratio(self.labelled / self.classes, row.labelled / row.classes),
        ]
        return sum(distances) if max(distances) <= math.log(NEAR) else math.inf


def log_ratio(first: float, second: float) -> float:
    """Return the logarithm of the larger of two numbers over the smaller."""
    return abs(math.log(max(first, 1e-9) / max(second, 1e-9)))


@cache
def rows(file: Path = FILE) -> tuple[Measured, ...]:
    """Read the table of measured runs."""
    with file.open(newline="") as opened:
        return tuple(_row(values) for values in csv.DictReader(opened))


def _row(values: dict[str, str]) -> Measured:
    row: dict[str, Any] = {}
    for field in fields(Measured):
        convert: Any = field.type
        if convert in (str, int, float):
            row[field.name] = convert(values[field.name])
    row["pretrained"] = values["pretrained"] == "True"
    points = (point.split(":") for point in values["curve"].split())
    row["curve"] = tuple(
        (float(seconds), float(accuracy)) for seconds, accuracy in points
    )
    return Measured(**row)


def comparable(
    situation: Situation, table: Iterable[Measured] | None = None
) -> list[Measured]:
    """Return the runs of the nearest measured images; [] if none are comparable."""
    measured = list(rows() if table is None else table)
    nearest = min(measured, key=situation.distance, default=None)
    if nearest is None or math.isinf(situation.distance(nearest)):
        return []
    return [
        row
        for row in measured
        if row.title == nearest.title and row.pretrained == nearest.pretrained
    ]


def contrast(
    table: Sequence[Measured], key: str, now: Any, better: Any
) -> tuple[Measured, Measured] | None:
    """Return two runs that differ in one key only, near two values of that key.

    None: there are no such runs.
    """
    pairs = []
    for first in table:
        for second in table:
            distances = (
                _distance(getattr(first, key), now),
                _distance(getattr(second, key), better),
            )
            if max(distances) <= math.log(SIMILAR) and _differ_only_in(
                key, first, second
            ):
                pairs.append((sum(distances), first.accuracy, first, second))
    if not pairs:
        return None
    _, _, first, second = min(pairs, key=lambda pair: pair[:2])
    return first, second


def contrast_text(pair: tuple[Measured, Measured] | None, key: str) -> str:
    """Return two contrasted runs in words."""
    if pair is None:
        return "no comparable run was measured"
    first, second = pair
    results = (
        f"{_value_text(key, row)} reached {percent(row.accuracy)}"
        for row in (second, first)
    )
    epochs = "" if key == "epochs" else f", {second.epochs:g} epochs"
    return f"{' and '.join(results)} ({second.title}{epochs}, one seed)"


def _distance(first: Any, second: Any) -> float:
    """Return the `log_ratio` of two numbers; unequal words are infinitely far apart."""
    if isinstance(first, str):
        return 0.0 if first == second else math.inf
    return log_ratio(first, second)


def _differ_only_in(key: str, first: Measured, second: Measured) -> bool:
    """Return whether two runs differ in a key and in no other one.

    They then have the same fitted teacher.
    """
    if first.arm != "distilled" or getattr(first, key) == getattr(second, key):
        return False
    keys = {"arm", "teacher", "student", "views", "epochs", "other"} - {key}
    fresh = first.views == first.epochs and second.views == second.epochs
    if key == "epochs" and fresh:  # fresh views in each epoch
        keys -= {"views"}
    return all(getattr(first, name) == getattr(second, name) for name in keys)


def _value_text(key: str, row: Measured) -> str:
    value = getattr(row, key)
    return str(value) if isinstance(value, str) else f"{value:g} {key}"


def comparison_text(table: Sequence[Measured]) -> str:
    """Return what labels alone reached, and from which cost on distilling was better.

    The runs of `table` are comparable.
    """
    alone = [row for row in table if row.arm == "labels"]
    taught = [row for row in table if row.arm == "distilled"]
    if not alone or not taught:
        return ""
    labels, best = (max(arm, key=lambda row: row.accuracy) for arm in (alone, taught))
    text = (
        f"{best.title}: labels alone reached {percent(labels.accuracy)} at most, after"
        f" {format_seconds(labels.seconds)}; "
    )
    level = max(accuracy for _, accuracy in labels.curve)
    paid = [seconds for row in taught if (seconds := pays_from(row, level)) is not None]
    if not paid:
        seconds = format_seconds(best.seconds)
        return f"{text}distilling {percent(best.accuracy)} after {seconds}"
    teacher = f"teacher {percent(best.teacher)}"
    return (
        text + f"distilling was better from {format_seconds(min(paid))} on, and reached"
        f" {percent(best.accuracy)} ({teacher})"
    )


def pays_from(row: Measured, level: float) -> float | None:
    """Return the cost from which on a run's accuracy stayed above a level, in seconds.

    The accuracy is on validation images. None: it never did.
    """
    since = None
    for seconds, accuracy in row.curve:
        if accuracy <= level:
            since = None
        elif since is None:
            since = row.before + seconds
    return since
