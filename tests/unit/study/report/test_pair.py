"""The pair of student and teacher in the report, against counting it image by image."""

from dataclasses import replace

import numpy as np
import pytest

from kd.study.report.confusion import Half, pair_cards
from kd.study.report.record import Predictions

CLASSES = ("apple", "fig", "pear")


def answers(images: int, seed: int) -> Predictions:
    """A teacher right on 0.9 of the images, and a student that is as right as it is
    sure, in steps of 0.01.
    """
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, images)
    sure = np.round(1 - 0.5 * rng.random(images) ** 2, 2)
    student = np.where(rng.random(images) < sure, label, (label + 1) % 3)
    teacher = np.where(rng.random(images) < 0.9, label, (label + 2) % 3)
    lists = (label.tolist(), student.tolist(), teacher.tolist())
    cost = {"student": 2.0, "teacher": 10.0}
    return Predictions(
        CLASSES, *lists, of=images, student_sure=sure.tolist(), cpu_ms=cost
    )


def test_a_worse_student_passes_all_on_and_an_equal_one_no_image():
    scored = answers(400, 2)
    wrong = replace(
        scored,
        student=[(label + 1) % 3 for label in scored.label],
        teacher=scored.label,
    )
    assert Half.of(wrong, 0).threshold() == float("inf")
    assert "Where every image is passed on" in pair_cards(wrong)[1].hints[0]
    assert Half.of(
        replace(scored, student=scored.label), 0
    ).threshold() == pytest.approx(min(scored.student_sure[::2]))


def test_nothing_is_shown_without_a_teacher():
    assert pair_cards(replace(answers(100, 3), teacher=[])) == []
    assert "CPU" not in str(pair_cards(replace(answers(100, 3), cpu_ms={})))
