"""The section on predictions: accuracy by class, confusion, photographs on which the
models differ, and cascading.

For the pair (the student passes unsure images on to its teacher): accuracy and cost by
the share passed on. Every second validation image chooses the threshold; curve and
intervals are from the others. kd/deploy/export/defer.py writes such a threshold into an
export.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kd.core.intervals import paired_interval, wilson_interval
from kd.core.text import percent
from kd.study.report.charts import Axis, Level, Series, lines
from kd.study.report.record import FEWEST, Predictions, RunRecord
from kd.study.report.sections import HALF
from kd.study.report.view import Card, Grid, Section

# most classes of a confusion matrix on a page; with more, the most frequent confusions
# are listed
MOST_CLASSES = 24
MOST_CONFUSIONS, MOST_LETTERS = (
    20,
    24,
)  # rows of that list, a screen long; letters of a class name, half a card wide


def answers(runs: Sequence[RunRecord]) -> list[Section]:
    """Show the student's confusions, its classes worse than the teacher's, and the
    photographs on which they differ.
    """
    sections = []
    for run in runs:
        predictions = run.answers
        if predictions is None or not predictions.label:
            continue
        name = f" of {run.name}" if len(runs) > 1 else ""
        grids = [Grid([_by_class(predictions), _confusion(predictions)], 2)]
        if cards := pair(predictions):
            grids.append(Grid(cards, 2))
        if predictions.pictures:
            grids.append(Grid([_photographs(predictions)]))
        sections.append(
            Section(f"Predictions{name}", grids, predictions.without_leaks())
        )
    return sections


def _by_class(predictions: Predictions) -> Card:
    """Return each class's accuracy for the student and, if there is one, the teacher;
    largest loss first.
    """
    student = predictions.accuracy(predictions.student)
    teacher = (
        predictions.accuracy(predictions.teacher) if predictions.teacher else student
    )
    classes = [i for i, value in enumerate(student) if not math.isnan(value)]
    order = sorted(classes, key=lambda i: (student[i] - teacher[i], student[i]))
    names, hints, images = short_names(predictions.classes), [], predictions.images()
    if len(order) > MOST_CLASSES:
        worst = MOST_CLASSES - 6
        hints.append(
            f"{MOST_CLASSES} of {len(order)} classes are drawn: the {worst} worst ones"
            " and the 6 best ones."
        )
        order = [*order[:worst], *order[-6:]]
    hints += _doubts(
        predictions, [names[i] for i in range(len(names)) if not images[i]]
    )
    rows = []
    for i in order:
        few = images[i] < FEWEST
        shares = (
            {"teacher": teacher[i], "student": student[i]}
            if predictions.teacher
            else {"student": student[i]}
        )
        gap = (
            f"{100 * (student[i] - teacher[i]):+.0f} points"
            if predictions.teacher
            else percent(student[i])
        )
        if few:  # for few images a percentage claims too much precision
            gap = f"{round(student[i] * images[i])} of {images[i]}"
        low, high = min(shares.values()), max(shares.values())
        rows.append(
            {
                "name": names[i] + (" *" if few else ""),
                "title": f"{predictions.classes[i]}: {images[i]} images",
                "low": f"{100 * low:.1f}",
                "width": f"{100 * (high - low):.1f}",
                "dots": [
                    {
                        "who": who,
                        "percent": f"{100 * share:.1f}",
                        "text": percent(share),
                    }
                    for who, share in shares.items()
                ],
                "gap": gap,
            }
        )
    total = len(predictions.label)
    part = f" ({total} of {predictions.of} images)" if total < predictions.of else ""
    legend = [("student", "var(--c1)")]
    legend += [("teacher", "var(--teacher)")] if predictions.teacher else []
    return Card(f"Accuracy by class{part}", hints, dumbbells=rows, legend=legend)


def _doubts(one: Predictions, absent: Sequence[str]) -> list[str]:
    """Name the classes with too few images, or none, for a reliable accuracy."""
    few, total = sum(0 < count < FEWEST for count in one.images()), len(one.label)
    lines = [
        f"* {few} of {len(one.classes)} classes have fewer than {FEWEST} images: a few"
        " predictions more or less."
    ]
    shown = ", ".join(absent[:6]) + (", ..." if len(absent) > 6 else "")
    text = (
        f"{len(absent)} of {len(one.classes)} classes have no image among the {total:,}"
        f" images used, so nothing is known about them: {shown}."
    )
    return [*(lines if few else []), *([text] if absent else [])]


def short_names(names: Sequence[str], most: int = MOST_LETTERS) -> list[str]:
    """Shorten names to their shortest unique suffix, in at most `most` letters."""
    ends = [
        [name.split("/", cut)[-1] for cut in range(name.count("/"), -1, -1)]
        for name in names
    ]
    counts = Counter(end for one in ends for end in one)
    own = [next((end for end in one if counts[end] == 1), one[-1]) for one in ends]
    head, tail = most * 2 // 5, most - most * 2 // 5 - 1
    cut = [end if len(end) <= most else f"{end[:head]}…{end[-tail:]}" for end in own]
    counts = Counter(cut)
    return [
        (
            short
            if counts[short] == 1
            else f"…{end[1 - most :]}"
            if len(end) > most
            else end
        )
        for short, end in zip(cut, own, strict=True)
    ]


def _confusion(predictions: Predictions) -> Card:
    counts, names = predictions.confusion(), short_names(predictions.classes)
    if len(predictions.classes) > MOST_CLASSES:
        return _frequent_confusions(counts, names)
    rows = []
    for i, row in enumerate(counts):
        total = sum(row) or 1
        cells = [_cell(count, count / total, i == j) for j, count in enumerate(row)]
        rows.append({"name": names[i], "title": predictions.classes[i], "cells": cells})
    return Card("Confusion", confusion=rows)


def _cell(count: int, share: float, right: bool) -> dict[str, Any]:
    """Return a cell of the matrix, tinted by its share of the row; `mix`: percent of
    the colour.
    """
    kind = "right" if right else "wrong"
    strong = " strong" if share > 0.6 else ""  # from there on dark text is hard to read
    return {
        "count": count,
        "kind": kind + strong,
        "mix": round(8 + 72 * share) if count else 0,
    }


def _frequent_confusions(counts: Sequence[Sequence[int]], names: Sequence[str]) -> Card:
    every = [
        (count, i, j)
        for i, row in enumerate(counts)
        for j, count in enumerate(row)
        if i != j and count
    ]
    heads = ("label", "student's prediction", "images")
    frequent = sorted(every, reverse=True)[:MOST_CONFUSIONS]
    rows: list[dict[str, Any]] = [
        dict(zip(heads, (names[i], names[j], count), strict=True))
        for count, i, j in frequent
    ]
    hints = (
        [f"The {len(rows)} most frequent of {len(every)} confusions."] if rows else []
    )
    return Card("Confusion", hints, table=rows, left=heads[:2])


def _photographs(predictions: Predictions) -> Card:
    names = dict(
        zip(predictions.classes, short_names(predictions.classes), strict=True)
    )
    pictures = []
    for picture in predictions.pictures:
        answers = {
            "teacher": (picture.teacher, picture.teacher_share),
            "student": (picture.student, picture.student_share),
        }
        captions = [
            {
                "who": who,
                "kind": "right" if answer == picture.truth else "wrong",
                "name": names[answer],
                "percent": f"{100 * share:.0f}",
            }
            for who, (answer, share) in answers.items()
        ]
        truth = names[picture.truth]
        pictures.append(
            {
                "name": picture.name,
                "data": picture.data,
                "truth": truth,
                "captions": captions,
            }
        )
    return Card(
        "Photographs on which teacher and student differ, the surest teacher first",
        pictures=pictures,
    )


SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)  # rows of the table


@dataclass(frozen=True, slots=True)
class Half:
    """A subset of the images, by the student's confidence, least sure first."""

    sure: np.ndarray  # the student's confidence, float64 [N]
    student: np.ndarray  # whether it is right, bool [N]
    teacher: np.ndarray

    @classmethod
    def of(cls, one: Predictions, first: int) -> Half:
        """Return every second image from `first` on."""
        label, student, teacher = (
            np.array(part)[first::2] for part in (one.label, one.student, one.teacher)
        )
        sure = np.array(one.student_sure)[first::2]
        order = np.argsort(sure, kind="stable")
        return cls(sure[order], (student == label)[order], (teacher == label)[order])

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the possible numbers of images passed on (ties together), and the
        right predictions then, [K].
        """
        gained = np.concatenate(
            [[0], np.cumsum(self.teacher.astype(int) - self.student)]
        )
        cuts = np.flatnonzero(
            np.concatenate([[True], self.sure[1:] > self.sure[:-1], [True]])
        )
        return cuts, self.student.sum() + gained[cuts]

    def threshold(self) -> float:
        """Return the lowest threshold of the student's confidence at which the pair is
        as accurate as the teacher.
        """
        cuts, right = self.curve()
        cut = int(
            cuts[np.argmax(right >= self.teacher.sum())]
        )  # passing on all images equals it
        return float(self.sure[cut]) if cut < len(self.sure) else float("inf")


def pair(predictions: Predictions) -> list[Card]:
    """Show the pair as cards; [] without a teacher's predictions or with fewer than 20
    images.
    """
    if not predictions.teacher or len(predictions.student_sure) < 20:
        return []
    chosen, shown = Half.of(predictions, 0), Half.of(predictions, 1)
    threshold = chosen.threshold()
    cuts, right = shown.curve()
    images = len(shown.sure)
    name = "student, and the teacher where it is unsure"
    curve = Series(name, "var(--c1)", [*(cuts / images)], [*(right / images)])
    teacher = Level("teacher alone", "var(--teacher)", y=float(shown.teacher.mean()))
    chart = lines(
        [curve],
        HALF,
        Axis("share passed on to the teacher", "%", zero=True),
        Axis(unit="%"),
        [teacher],
    )
    rows = []
    for share in SHARES:
        k = int(np.searchsorted(cuts, share * images))
        rows.append(
            {
                "passed on": percent(cuts[k] / images),
                "accuracy": percent(right[k] / images),
            }
        )
        if cost := _cost(predictions, cuts[k] / images):
            rows[-1]["CPU time, teacher = 1"] = cost
    hint = _summary(predictions, shown, shown.sure < threshold, threshold)
    return [
        Card("Student and teacher as a pair", chart=chart),
        Card(hints=[hint], table=rows),
    ]


def _cost(one: Predictions, share: float) -> str:
    student, teacher = (one.cpu_ms.get(name, 0.0) for name in ("student", "teacher"))
    return f"{student / teacher + share:.2f}" if student and teacher else ""


def _summary(
    one: Predictions, shown: Half, passed: np.ndarray, threshold: float
) -> str:
    images, count = len(passed), int(passed.sum())
    both = np.where(passed, shown.teacher, shown.student)
    low, high = paired_interval(
        int((both & ~shown.teacher).sum()), int((shown.teacher & ~both).sum()), images
    )
    ends = " to ".join(map(percent, wilson_interval(count / images, images)))
    cost = _cost(one, count / images)
    begin = (
        "Where every image is passed on"
        if count == images
        else f"If predictions below {threshold:.3f} are passed on"
    )
    return (
        f"{begin}, the pair has as many right as the teacher on the"
        f" {len(one.label) - images} images that chose this. On the {images} others"
        f" that is {percent(count / images)} of the images ({ends}); the pair has"
        f" {percent(both.mean())} right, the teacher {percent(shown.teacher.mean())}:"
        f" {100 * (both.mean() - shown.teacher.mean()):+.1f} points ({100 * low:+.1f}"
        f" to {100 * high:+.1f}){f', for {cost} of its CPU time' if cost else ''}. The"
        " confidence is calibrated on the images that chose."
    )
