"""Show predictions on a page.

The section has accuracy by class, confusion, images on which the models differ, and
cascading. For the pair (the student passes unsure images on to its teacher): accuracy
and cost by the share passed on. Every second validation image chooses the threshold;
curve and intervals are from the others. kd/deploy/export/defer.py writes such a
threshold into an export.
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
MOST_CONFUSIONS = 20  # rows of that list, a screen long
MOST_LETTERS = 24  # of a class name, half a card wide


def prediction_sections(runs: Sequence[RunRecord]) -> list[Section]:
    """Show the predictions of each run that has some on labelled images."""
    sections = []
    for run in runs:
        predictions = run.answers
        if predictions is None or not predictions.label:
            continue
        name = f" of {run.name}" if len(runs) > 1 else ""
        grids = [Grid([_by_class(predictions), _confusion(predictions)], 2)]
        if cards := pair_cards(predictions):
            grids.append(Grid(cards, 2))
        if predictions.pictures:
            grids.append(Grid([_photographs(predictions)]))
        sections.append(
            Section(f"Predictions{name}", grids, predictions.without_leaks())
        )
    return sections


def _by_class(predictions: Predictions) -> Card:
    """Return each class's accuracy for the models, the largest loss first."""
    student = predictions.accuracy(predictions.student)
    teacher = student
    if predictions.teacher:
        teacher = predictions.accuracy(predictions.teacher)
    classes = [i for i, share in enumerate(student) if not math.isnan(share)]
    order = sorted(classes, key=lambda i: (student[i] - teacher[i], student[i]))
    names = short_names(predictions.classes)
    images = predictions.images()
    hints = []
    if len(order) > MOST_CLASSES:
        worst = MOST_CLASSES - 6
        hints.append(
            f"{MOST_CLASSES} of {len(order)} classes are drawn: the {worst} worst ones"
            " and the 6 best ones."
        )
        order = [*order[:worst], *order[-6:]]
    hints += _few_images_hints(predictions, names)
    rows = []
    for i in order:
        shares = {"student": student[i]}
        text = percent(student[i])
        if predictions.teacher:
            shares = {"teacher": teacher[i], **shares}
            text = f"{100 * (student[i] - teacher[i]):+.0f} points"
        few = images[i] < FEWEST
        if few:  # for few images a percentage claims too much precision
            text = f"{round(student[i] * images[i])} of {images[i]}"
        low = min(shares.values())
        width = max(shares.values()) - low
        dots = [
            {"who": model, "percent": f"{100 * share:.1f}", "text": percent(share)}
            for model, share in shares.items()
        ]
        rows.append(
            {
                "name": names[i] + (" *" if few else ""),
                "title": f"{predictions.classes[i]}: {images[i]} images",
                "low": f"{100 * low:.1f}",
                "width": f"{100 * width:.1f}",
                "dots": dots,
                "gap": text,
            }
        )
    title = "Accuracy by class"
    total = len(predictions.label)
    if total < predictions.of:
        title += f" ({total} of {predictions.of} images)"
    legend = [("student", "var(--c1)")]
    if predictions.teacher:
        legend.append(("teacher", "var(--teacher)"))
    return Card(title, hints, dumbbells=rows, legend=legend)


def _few_images_hints(predictions: Predictions, names: Sequence[str]) -> list[str]:
    """Name the classes with too few images, or none, for a reliable accuracy."""
    images = predictions.images()
    hints = []
    if few := sum(0 < count < FEWEST for count in images):
        hints.append(
            f"* {few} of {len(names)} classes have fewer than {FEWEST} images: a few"
            " predictions more or less."
        )
    absent = [name for name, count in zip(names, images, strict=True) if not count]
    if absent:
        first = ", ".join(absent[:6]) + (", ..." if len(absent) > 6 else "")
        hints.append(
            f"{len(absent)} of {len(names)} classes have no image among the"
            f" {len(predictions.label):,} images used, so nothing is known about them:"
            f" {first}."
        )
    return hints


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten names to their shortest unique suffix, in at most `MOST_LETTERS`."""
    ends_of = [
        [name.split("/", cut)[-1] for cut in range(name.count("/"), -1, -1)]
        for name in names
    ]
    counts = Counter(end for ends in ends_of for end in ends)
    unique = [
        next((end for end in ends if counts[end] == 1), ends[-1]) for ends in ends_of
    ]
    head = MOST_LETTERS * 2 // 5
    tail = MOST_LETTERS - head - 1
    cut = [
        name if len(name) <= MOST_LETTERS else f"{name[:head]}…{name[-tail:]}"
        for name in unique
    ]
    counts = Counter(cut)
    for i, name in enumerate(unique):
        if counts[cut[i]] > 1 and len(name) > MOST_LETTERS:
            cut[i] = f"…{name[1 - MOST_LETTERS :]}"
    return cut


def _confusion(predictions: Predictions) -> Card:
    counts = predictions.confusion()
    names = short_names(predictions.classes)
    if len(predictions.classes) > MOST_CLASSES:
        return _frequent_confusions(counts, names)
    rows = []
    for i, row in enumerate(counts):
        total = sum(row) or 1
        cells = [_cell(count, count / total, i == j) for j, count in enumerate(row)]
        rows.append({"name": names[i], "title": predictions.classes[i], "cells": cells})
    return Card("Confusion", confusion=rows)


def _cell(count: int, share: float, right: bool) -> dict[str, Any]:
    """Return a cell of the matrix; `mix`: percent of the colour, by its share."""
    kind = "right" if right else "wrong"
    if share > 0.6:  # from there on dark text is hard to read
        kind += " strong"
    return {"count": count, "kind": kind, "mix": round(8 + 72 * share) if count else 0}


def _frequent_confusions(counts: Sequence[Sequence[int]], names: Sequence[str]) -> Card:
    confusions = [
        (count, i, j)
        for i, row in enumerate(counts)
        for j, count in enumerate(row)
        if i != j and count
    ]
    heads = ("label", "student's prediction", "images")
    frequent = sorted(confusions, reverse=True)[:MOST_CONFUSIONS]
    rows: list[dict[str, Any]] = [
        dict(zip(heads, (names[i], names[j], count), strict=True))
        for count, i, j in frequent
    ]
    hints = []
    if rows:
        hints = [f"The {len(rows)} most frequent of {len(confusions)} confusions."]
    return Card("Confusion", hints, table=rows, left_columns=heads[:2])


def _photographs(predictions: Predictions) -> Card:
    names = dict(
        zip(predictions.classes, short_names(predictions.classes), strict=True)
    )
    pictures = []
    for picture in predictions.pictures:
        captions = [
            {
                "who": model,
                "kind": "right" if answer == picture.truth else "wrong",
                "name": names[answer],
                "percent": f"{100 * share:.0f}",
            }
            for model, answer, share in (
                ("teacher", picture.teacher, picture.teacher_share),
                ("student", picture.student, picture.student_share),
            )
        ]
        pictures.append(
            {
                "name": picture.name,
                "data": picture.data,
                "truth": names[picture.truth],
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
    def of(cls, predictions: Predictions, first: int) -> Half:
        """Return every second image from `first` on."""
        sure = np.array(predictions.student_sure)[first::2]
        order = np.argsort(sure, kind="stable")
        label = np.array(predictions.label)[first::2]
        student = np.array(predictions.student)[first::2] == label
        teacher = np.array(predictions.teacher)[first::2] == label
        return cls(sure[order], student[order], teacher[order])

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the possible numbers of images passed on, and the right predictions.

        Both are [K]; images with equal confidence are passed on together.
        """
        gains = np.cumsum(self.teacher.astype(int) - self.student)
        gains = np.concatenate([[0], gains])
        rises = self.sure[1:] > self.sure[:-1]
        cuts = np.flatnonzero(np.concatenate([[True], rises, [True]]))
        return cuts, self.student.sum() + gains[cuts]

    def threshold(self) -> float:
        """Return the lowest threshold at which the pair is as accurate as the teacher.

        It is a threshold of the student's confidence.
        """
        cuts, right = self.curve()
        # passing on all images equals the teacher
        cut = int(cuts[np.argmax(right >= self.teacher.sum())])
        return float(self.sure[cut]) if cut < len(self.sure) else float("inf")


def pair_cards(predictions: Predictions) -> list[Card]:
    """Show the pair as cards; [] without a teacher or with fewer than 20 images."""
    if not predictions.teacher or len(predictions.student_sure) < 20:
        return []
    threshold = Half.of(predictions, 0).threshold()
    half = Half.of(predictions, 1)
    cuts, right = half.curve()
    images = len(half.sure)
    name = "student, and the teacher where it is unsure"
    curve = Series(name, "var(--c1)", [*(cuts / images)], [*(right / images)])
    teacher = Level("teacher alone", "var(--teacher)", y=float(half.teacher.mean()))
    x_axis = Axis("share passed on to the teacher", "%", zero=True)
    chart = lines([curve], HALF, x_axis, Axis(unit="%"), [teacher])
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
    hint = _summary(predictions, half, threshold)
    return [
        Card("Student and teacher as a pair", chart=chart),
        Card(hints=[hint], table=rows),
    ]


def _cost(predictions: Predictions, share: float) -> str:
    student = predictions.cpu_ms.get("student")
    teacher = predictions.cpu_ms.get("teacher")
    return f"{student / teacher + share:.2f}" if student and teacher else ""


def _summary(predictions: Predictions, half: Half, threshold: float) -> str:
    passed = half.sure < threshold
    images = len(passed)
    count = int(passed.sum())
    right = np.where(passed, half.teacher, half.student)
    low, high = paired_interval(
        int((right & ~half.teacher).sum()), int((half.teacher & ~right).sum()), images
    )
    ends = " to ".join(map(percent, wilson_interval(count / images, images)))
    cost = _cost(predictions, count / images)
    begin = f"If predictions below {threshold:.3f} are passed on"
    if count == images:
        begin = "Where every image is passed on"
    accuracy = right.mean()
    teacher = half.teacher.mean()
    return (
        f"{begin}, the pair has as many right as the teacher on the"
        f" {len(predictions.label) - images} images that chose this. On the {images}"
        f" others that is {percent(count / images)} of the images ({ends}); the pair"
        f" has {percent(accuracy)} right, the teacher {percent(teacher)}:"
        f" {100 * (accuracy - teacher):+.1f} points ({100 * low:+.1f} to"
        f" {100 * high:+.1f}){f', for {cost} of its CPU time' if cost else ''}. The"
        " confidence is calibrated on the images that chose."
    )
