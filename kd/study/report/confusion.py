"""The section on predictions: accuracy by class, confusion, photographs on which the models differ, and cascading.

For the pair (the student passes unsure images on to its teacher): accuracy and cost by the share passed on. Every
second validation image chooses the threshold; curve and intervals are from the others. kd/deploy/export/defer.py writes
such a threshold into an export.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kd.core.intervals import paired, wilson
from kd.core.text import html_table, percent
from kd.study.report.record import FEWEST, Predictions, RunRecord
from kd.study.report.sections import card, section
from kd.study.report.svg import Series, esc, legend, lines

MOST_CLASSES = 24  # most classes of a confusion matrix on a page; with more, the most frequent confusions are listed
MOST_CONFUSIONS, MOST_LETTERS = 20, 24  # rows of that list, a screen long; letters of a class name, half a card wide


def answers(runs: Sequence[RunRecord]) -> str:
    """Show the student's confusions, its classes worse than the teacher's, and the photographs on which they differ."""
    sections = ""
    for run in runs:
        if run.answers is None or not run.answers.label:
            continue
        one, who = run.answers, f" of {run.name}" if len(runs) > 1 else ""
        part = f" ({len(one.label)} of {one.of} images)" if len(one.label) < one.of else ""
        cards = card(f"Accuracy by class{part}", _dumbbells(one)) + card("Confusion", _confusion(one))
        both = f'<div class="grid two">{cards}</div>'
        sections += section(f"Predictions{who}", one.without_leaks(), both, pair(one), _photographs(one))
    return sections


def _dumbbells(one: Predictions) -> str:
    """Draw each class's accuracy for the student and, if there is one, the teacher; largest loss first."""
    student = one.accuracy(one.student)
    teacher = one.accuracy(one.teacher) if one.teacher else student
    classes = [i for i, value in enumerate(student) if not math.isnan(value)]
    order = sorted(classes, key=lambda i: (student[i] - teacher[i], student[i]))
    rows, names, hint, images = [], short_names(one.classes), "", one.images()
    if len(order) > MOST_CLASSES:
        worst = MOST_CLASSES - 6
        hint = f"{MOST_CLASSES} of {len(order)} classes are drawn: the {worst} worst ones and the 6 best ones."
        order = [*order[:worst], *order[-6:]]
    for i in order:
        low, high = sorted((student[i], teacher[i]))
        dots = {"student": (student[i], "background:var(--c1)")}
        if one.teacher:
            dots = {"teacher": (teacher[i], "background:var(--card);border:3px solid var(--teacher)"), **dots}
        gap = f"{100 * (student[i] - teacher[i]):+.0f} points" if one.teacher else percent(student[i])
        if images[i] < FEWEST:  # for few images a percentage claims too much precision
            gap = f"{round(student[i] * images[i])} of {images[i]}"
        rail = f'<u style="left:{100 * low:.1f}%;width:{100 * (high - low):.1f}%"></u>'
        for who, (share, style) in dots.items():
            rail += f'<i style="left:{100 * share:.1f}%;{style}" title="{who} {percent(share)}"></i>'
        few = " *" if images[i] < FEWEST else ""
        title = esc(f"{one.classes[i]}: {images[i]} images")
        rows.append(
            f'<div class="dumb"><span class="name" title="{title}">{esc(names[i])}{few}</span>'
            f'<span class="rail">{rail}</span><span class="gap">{gap}</span></div>'
        )
    ends = '<span class="ends"><span>0 %</span><span>100 %</span></span>'
    rows.append(f'<div class="dumb"><span></span>{ends}<span></span></div>')
    entries = [("student", "--c1"), ("teacher", "--teacher")] if one.teacher else [("student", "--c1")]
    hints = [hint, *_doubts(one, [names[i] for i in range(len(names)) if not images[i]])]
    return "".join(f'<p class="hint">{esc(line)}</p>' for line in hints if line) + "".join(rows) + legend(entries)


def _doubts(one: Predictions, absent: Sequence[str]) -> list[str]:
    """Name the classes with too few images, or none, for a reliable accuracy."""
    few, total = sum(0 < count < FEWEST for count in one.images()), len(one.label)
    lines = [f"* {few} of {len(one.classes)} classes have fewer than {FEWEST} images: a few predictions more or less."]
    shown = ", ".join(absent[:6]) + (", ..." if len(absent) > 6 else "")
    text = (
        f"{len(absent)} of {len(one.classes)} classes have no image among the {total:,} images used, "
        f"so nothing is known about them: {shown}."
    )
    return [*(lines if few else []), *([text] if absent else [])]


def short_names(names: Sequence[str], most: int = MOST_LETTERS) -> list[str]:
    """Shorten names to their shortest unique suffix, in at most `most` letters."""
    ends = [[name.split("/", cut)[-1] for cut in range(name.count("/"), -1, -1)] for name in names]
    counts = Counter(end for one in ends for end in one)
    own = [next((end for end in one if counts[end] == 1), one[-1]) for one in ends]
    head, tail = most * 2 // 5, most - most * 2 // 5 - 1
    cut = [end if len(end) <= most else f"{end[:head]}…{end[-tail:]}" for end in own]
    counts = Counter(cut)
    return [
        short if counts[short] == 1 else f"…{end[1 - most :]}" if len(end) > most else end
        for short, end in zip(cut, own, strict=True)
    ]


def _confusion(one: Predictions) -> str:
    counts, names = one.confusion(), short_names(one.classes)
    if len(one.classes) > MOST_CLASSES:
        every = ((count, i, j) for i, row in enumerate(counts) for j, count in enumerate(row) if i != j and count)
        pairs, heads = sorted(every, reverse=True), ("label", "student's prediction", "images")
        rows = [dict(zip(heads, (names[i], names[j], n), strict=True)) for n, i, j in pairs[:MOST_CONFUSIONS]]
        hint = f'<p class="hint">The {len(rows)} most frequent of {len(pairs)} confusions.</p>' if rows else ""
        return hint + html_table(rows, ("label", "student's prediction"))
    heads, lines = "", []
    for i, row in enumerate(counts):
        full, name = esc(one.classes[i]), esc(names[i])
        heads += f'<th class="top" title="{full}">{name}</th>'
        total, cells = sum(row) or 1, ""
        for j, count in enumerate(row):
            tint, share = "--good" if i == j else "--bad", count / total
            mix = f"color-mix(in oklab, var({tint}) {round(8 + 72 * share) if count else 0}%, transparent)"
            strong = ";color:var(--paper)" if share > 0.6 else ""
            cells += f'<td style="background:{mix}{strong}">{count or ""}</td>'
        lines.append(f'<tr><th scope="row" title="{full}">{name}</th>{cells}</tr>')
    hint = (
        '<p class="hint" style="margin:10px 0 0">Row: label. Column: the student\'s prediction. Number of images.</p>'
    )
    return f'<table class="confusion"><tr><th></th>{heads}</tr>{"".join(lines)}</table>{hint}'


def _photographs(one: Predictions) -> str:
    if not one.pictures:
        return ""
    figures, names = [], dict(zip(one.classes, short_names(one.classes), strict=True))
    for picture in one.pictures:
        captions = []
        for who in ("teacher", "student"):
            answer, share = getattr(picture, who), getattr(picture, f"{who}_share")
            kind = "right" if answer == picture.truth else "wrong"
            captions.append(f'{who}: <span class="{kind}">{esc(names[answer])}</span> {100 * share:.0f} %')
        figures.append(
            f'<figure><img alt="{esc(picture.name)}" title="{esc(picture.name)}" src="{picture.data}">'
            f"<figcaption><b>{esc(names[picture.truth])}</b><br>{'<br>'.join(captions)}</figcaption></figure>"
        )
    title = "Photographs on which teacher and student differ, the surest teacher first"
    return card(title, f'<div class="photos">{"".join(figures)}</div>')


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
        label, student, teacher = (np.array(part)[first::2] for part in (one.label, one.student, one.teacher))
        sure = np.array(one.student_sure)[first::2]
        order = np.argsort(sure, kind="stable")
        return cls(sure[order], (student == label)[order], (teacher == label)[order])

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the possible numbers of images passed on (ties together), and the right predictions then, [K]."""
        gained = np.concatenate([[0], np.cumsum(self.teacher.astype(int) - self.student)])
        cuts = np.flatnonzero(np.concatenate([[True], self.sure[1:] > self.sure[:-1], [True]]))
        return cuts, self.student.sum() + gained[cuts]

    def threshold(self) -> float:
        """Return the lowest threshold of the student's confidence at which the pair is as accurate as the teacher."""
        cuts, right = self.curve()
        cut = int(cuts[np.argmax(right >= self.teacher.sum())])  # passing on all images equals it
        return float(self.sure[cut]) if cut < len(self.sure) else float("inf")


def pair(one: Predictions) -> str:
    """Show the pair as cards; "" without a teacher's predictions or with fewer than 20 images."""
    if not one.teacher or len(one.student_sure) < 20:
        return ""
    chosen, shown = Half.of(one, 0), Half.of(one, 1)
    threshold = chosen.threshold()
    passed = shown.sure < threshold
    cuts, right = shown.curve()
    images, teacher = len(shown.sure), float(shown.teacher.mean())
    series = [
        Series("student, and the teacher where it is unsure", "--c1", [*(cuts / images)], [*(right / images)]),
        Series("teacher alone", "--teacher", [0.0, 1.0], [teacher, teacher], dashed=True),
    ]
    drawing = lines(series, (515, 260), "share passed on to the teacher", "%")
    names = legend([(each.name, each.color) for each in series])
    rows = []
    for share in SHARES:
        k = int(np.searchsorted(cuts, share * images))
        rows.append({"passed on": percent(cuts[k] / images), "accuracy": percent(right[k] / images)})
        if cost := _cost(one, cuts[k] / images):
            rows[-1]["CPU time, teacher = 1"] = cost
    hint = f'<p class="hint">{_summary(one, shown, passed, threshold)}</p>'
    grid = card("Student and teacher as a pair", drawing, names) + card("", hint, html_table(rows))
    return f'<div class="grid two">{grid}</div>'


def _cost(one: Predictions, share: float) -> str:
    student, teacher = (one.cpu_ms.get(name, 0.0) for name in ("student", "teacher"))
    return f"{student / teacher + share:.2f}" if student and teacher else ""


def _summary(one: Predictions, shown: Half, passed: np.ndarray, threshold: float) -> str:
    images, count = len(passed), int(passed.sum())
    both = np.where(passed, shown.teacher, shown.student)
    low, high = paired(int((both & ~shown.teacher).sum()), int((shown.teacher & ~both).sum()), images)
    ends = " to ".join(map(percent, wilson(count / images, images)))
    cost = _cost(one, count / images)
    begin = (
        "Where every image is passed on" if count == images else f"If predictions below {threshold:.3f} are passed on"
    )
    return (
        f"{begin}, the pair has as many right as the teacher on the {len(one.label) - images} images that chose this. "
        f"On the {images} others that is {percent(count / images)} of the images ({ends}); the pair has "
        f"{percent(both.mean())} right, the teacher {percent(shown.teacher.mean())}: "
        f"{100 * (both.mean() - shown.teacher.mean()):+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"
        f"{f', for {cost} of its CPU time' if cost else ''}. The confidence is calibrated on the images that chose."
    )
