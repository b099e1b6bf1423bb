"""The student with its teacher behind it: how right the pair is, and what it costs, by the share that is passed on.

Every second validation image chooses from which confidence on the student answers alone; the curve, the intervals and
the classes are of the others. kd/deploy/export/defer.py writes such a threshold into an export.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kd.core.intervals import paired, wilson
from kd.core.text import percent
from kd.study.report.record import FEWEST, Predictions
from kd.study.report.sections import card, table
from kd.study.report.svg import Series, legend, lines

SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)  # rows of the table
MOST_CLASSES = 40  # rows of the table by class: those of which most is passed on come first


@dataclass(frozen=True, slots=True)
class Half:
    """Some of the images, by the student's confidence, the least sure first."""

    label: np.ndarray
    sure: np.ndarray  # the student's confidence, float64 [N]
    student: np.ndarray  # whether it is right, bool [N]
    teacher: np.ndarray

    @classmethod
    def of(cls, one: Predictions, first: int) -> Half:
        """Return every second image from `first` on."""
        label, student, teacher = (np.array(part)[first::2] for part in (one.label, one.student, one.teacher))
        sure = np.array(one.student_sure)[first::2]
        order = np.argsort(sure, kind="stable")
        label, student, teacher = (part[order] for part in (label, student, teacher))
        return cls(label, sure[order], student == label, teacher == label)

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return how many images may be passed on, and how many the pair then has right, [K].

        Images of the same confidence are passed on together.
        """
        gained = np.concatenate([[0], np.cumsum(self.teacher.astype(int) - self.student)])
        cuts = np.flatnonzero(np.concatenate([[True], self.sure[1:] > self.sure[:-1], [True]]))
        return cuts, self.student.sum() + gained[cuts]

    def threshold(self) -> float:
        """Return the lowest confidence from which on the student may answer, so that the pair equals the teacher."""
        cuts, right = self.curve()
        cut = int(cuts[np.argmax(right >= self.teacher.sum())])  # passing all on equals it
        return float(self.sure[cut]) if cut < len(self.sure) else float("inf")


def pair(one: Predictions) -> str:
    """Show the pair as cards; empty without a teacher's answers or with fewer than 20 images."""
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
    grid = card("Student and teacher as a pair", drawing, names), card("", hint, table(rows))
    return f'<div class="grid two">{"".join(grid)}</div>{_classes(one, shown, passed)}'


def _cost(one: Predictions, share: float) -> str:
    student, teacher = (one.cpu_ms.get(name, 0.0) for name in ("student", "teacher"))
    return f"{student / teacher + share:.2f}" if student and teacher else ""


def _summary(one: Predictions, shown: Half, passed: np.ndarray, threshold: float) -> str:
    images, count = len(passed), int(passed.sum())
    both = np.where(passed, shown.teacher, shown.student)
    low, high = paired(int((both & ~shown.teacher).sum()), int((shown.teacher & ~both).sum()), images)
    ends = wilson(count / images, images)
    cost = _cost(one, count / images)
    begin = "Where every image is passed on" if count == images else f"If answers below {threshold:.3f} are passed on"
    return (
        f"{begin}, the pair has as many right as the teacher on the {len(one.label) - images} images that chose this. "
        f"On the {images} others that is {percent(count / images)} of the images ({percent(ends[0])} to "
        f"{percent(ends[1])}); the pair has {percent(both.mean())} right, the teacher "
        f"{percent(shown.teacher.mean())}: {100 * (both.mean() - shown.teacher.mean()):+.1f} points "
        f"({100 * low:+.1f} to {100 * high:+.1f})"
        + (f", for {cost} of its CPU time" if cost else "")
        + ". The confidence is calibrated on the images that chose."
    )


def _of_class(right: np.ndarray) -> str:
    """Return the share that is right, or how many where these are few."""
    return percent(right.mean()) if len(right) >= FEWEST else f"{right.sum()} of {len(right)}"


def _classes(one: Predictions, shown: Half, passed: np.ndarray) -> str:
    """Show each class, those of which most is passed on first."""
    both, rows = np.where(passed, shown.teacher, shown.student), []
    for label, name in enumerate(one.classes):
        if (of := shown.label == label).any():
            share = passed[of].mean()
            values = {"student": shown.student, "pair": both, "teacher": shown.teacher}
            cells = {who: _of_class(right[of]) for who, right in values.items()}
            rows.append((share, {"class": name, "images": int(of.sum()), "passed on": percent(share), **cells}))
    rows.sort(key=lambda row: -row[0])
    hint = f'<p class="hint">{MOST_CLASSES} of {len(rows)} classes.</p>' if len(rows) > MOST_CLASSES else ""
    return card("The pair by class", hint, table([row for _, row in rows[:MOST_CLASSES]], ("class",)))
