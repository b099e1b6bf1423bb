"""The pair of student and teacher in the report, against counting it image by image."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from kd.core.intervals import paired
from kd.study.report.confusion import Half, pair
from kd.study.report.record import Predictions

CLASSES = ("apple", "fig", "pear")


def answers(images: int, seed: int) -> Predictions:
    """A teacher right on 0.9 of the images, and a student that is as right as it is sure, in steps of 0.01."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, images)
    sure = np.round(1 - 0.5 * rng.random(images) ** 2, 2)
    student = np.where(rng.random(images) < sure, label, (label + 1) % 3)
    teacher = np.where(rng.random(images) < 0.9, label, (label + 2) % 3)
    lists = (label.tolist(), student.tolist(), teacher.tolist())
    cost = {"student": 2.0, "teacher": 10.0}
    return Predictions(CLASSES, *lists, of=images, student_sure=sure.tolist(), cpu_ms=cost)


def right(one: Predictions, first: int, threshold: float) -> tuple[int, int]:
    """Return how many images the pair has right, and how many it passes on, one image at a time."""
    correct = passed = 0
    for i in range(first, len(one.label), 2):
        on = one.student_sure[i] < threshold
        passed += on
        correct += (one.teacher if on else one.student)[i] == one.label[i]
    return correct, passed


def test_the_curve_is_what_counting_gives():
    one = answers(600, 0)
    shown = Half.of(one, 1)
    cuts, counts = shown.curve()
    assert (cuts[0], cuts[-1]) == (0, 300)
    assert counts[-1] == shown.teacher.sum()
    for cut, count in zip(cuts[:-1], counts[:-1], strict=True):
        assert (count, cut) == right(one, 1, shown.sure[cut])


def test_the_threshold_is_the_lowest_that_equals_the_teacher_on_the_half_that_chooses():
    one = answers(600, 1)
    found, teacher = Half.of(one, 0).threshold(), int(Half.of(one, 0).teacher.sum())
    thresholds = sorted({*one.student_sure[::2], float("inf")})
    assert found == next(value for value in thresholds if right(one, 0, value)[0] >= teacher)
    html = re.sub("<[^>]+>", " ", pair(one))
    correct, passed = right(one, 1, found)
    of_teacher = int(Half.of(one, 1).teacher.sum())
    assert f"that is {100 * passed / 300:.1f} % of the images" in html
    assert f"the pair has {100 * correct / 300:.1f} % right, the teacher {100 * of_teacher / 300:.1f} %" in html
    gained = sum(
        one.student_sure[i] >= found and one.student[i] == one.label[i] != one.teacher[i] for i in range(1, 600, 2)
    )
    low, high = paired(gained, gained - correct + of_teacher, 300)
    assert f"({100 * low:+.1f} to {100 * high:+.1f})" in html
    assert f"for {0.2 + passed / 300:.2f} of its CPU time" in html


def test_a_student_that_is_never_as_right_passes_all_on_and_one_that_always_is_none():
    one = answers(400, 2)
    wrong = replace(one, student=[(label + 1) % 3 for label in one.label], teacher=one.label)
    assert Half.of(wrong, 0).threshold() == float("inf")
    assert "Where every image is passed on" in pair(wrong)
    assert Half.of(replace(one, student=one.label), 0).threshold() == pytest.approx(min(one.student_sure[::2]))


def test_nothing_is_shown_without_a_teacher():
    assert pair(replace(answers(100, 3), teacher=[])) == ""
    assert "CPU" not in pair(replace(answers(100, 3), cpu_ms={}))
