"""Both arms over their total cost, by hand-made curves."""

import math
from dataclasses import replace

import pytest

from kd.parts.tasks.single_label import SCORES
from kd.study.paying import (
    AIM,
    LEAST,
    Arms,
    baseline_length,
    best_of,
    cost_of_step,
    has_stopped,
)
from kd.study.report.record import RunRecord


def run(scores=(0.5,), steps=100, seconds=60.0, teacher_share=0.0, **changes):
    """A run on a CPU whose steps took `seconds` in all, `teacher_share` of them in its
    teacher.
    """
    evaluated_steps = [round(steps * (i + 1) / len(scores)) for i in range(len(scores))]
    train = [
        {"step": step, "seconds": 1.0, "cpu_seconds": seconds * step / steps}
        | {
            "ms_teacher": 10 * teacher_share,
            "ms_forward": 4 * (1 - teacher_share),
            "ms_backward": 6 * (1 - teacher_share),
        }
        for step in evaluated_steps
    ]
    val = [
        {"step": step, "accuracy": score}
        for step, score in zip(evaluated_steps, scores, strict=True)
    ]
    return replace(
        RunRecord("one", {}, {"device": "cpu"}, train, val, [], SCORES), **changes
    )


@pytest.mark.parametrize(
    ("scores", "cost"),
    [
        ((0.4, 0.6, 0.7, 0.8), 30 + 30),
        ((0.6, 0.4, 0.7, 0.8), 30 + 45),  # it fell below once more
        ((0.6, 0.6, 0.7, 0.8), 30 + 15),
        (
            (0.6, 0.6, 0.7, 0.5),
            30 + 60,
        ),  # the last evaluation is no better: not before the end
        ((0.5, 0.5, 0.5, 0.5), 30 + 60),
    ],
)
def test_it_pays_from_where_it_stays_above_the_best_of_labels_alone(scores, cost):
    arms = Arms.of(
        run(scores, fitting_spent=30.0, baseline=run((0.3, 0.5, 0.4), seconds=75.0))
    )
    assert arms is not None
    assert arms.best == 0.5
    assert arms.pays_from == pytest.approx(cost)
    assert arms.end == pytest.approx(90.0)
    assert [*arms.alone] == pytest.approx([75 * step / 100 for step in (33, 67, 100)])


def test_stored_outputs_come_before_the_first_point_too():
    stored = {"device": "cpu", "at_hand": {"outputs": 9, "cpu_seconds": 20.0}}
    arms = Arms.of(run((0.4, 0.6), fitting_spent=30.0, manifest=stored, baseline=run()))
    assert arms is not None
    assert [*arms.distilled] == [80.0, 110.0]
    assert math.isnan(best_of(arms.distilled, 79.0))
    assert [best_of(arms.distilled, cost) for cost in (80.0, 110.0)] == [0.4, 0.6]


def test_unknown_costs_draw_no_curve():
    assert Arms.of(run()) is None
    assert Arms.of(run(fitting_spent=None, baseline=run())) is None
    assert Arms.of(run(baseline=run((0.5,), train=[]))) is None


@pytest.mark.parametrize(
    ("scores", "stopped"),
    [
        ([0.1, 0.5, *[0.4] * 2], False),  # too few to tell
        ([0.1, 0.5, *[0.5] * 10], True),  # an equal score is no new best
        ([*[0.1] * 9, 0.5, *[0.4] * 10], True),
        ([*[0.1] * 10, 0.5, *[0.4] * 9], False),
        ([0.5, *[0.4] * LEAST], True),
    ],
)
def test_labels_alone_have_stopped_after_half_of_their_evaluations(scores, stopped):
    assert has_stopped(dict(enumerate(scores))) == stopped


def test_labels_alone_get_the_cost_of_fit_outputs_and_student():
    """A step of the student without its teacher takes 0.45 s: a quarter of 60 s for 100
    steps is the teacher's.
    """
    stored = {"device": "cpu", "at_hand": {"outputs": 9, "cpu_seconds": 30.0}}
    record = run([0.1] * 20, teacher_share=0.25, fitting_spent=90.0, manifest=stored)
    assert cost_of_step(record) == pytest.approx(0.45)
    assert baseline_length(record) == {
        "steps": math.ceil(AIM * 180.0 / 0.45),
        "patience": 10,
    }
    assert (
        baseline_length(replace(record, fitting_spent=None))["steps"] == 100
    )  # unknown: as long as the student
    assert baseline_length(run([0.1] * 3))["patience"] == LEAST
    on_gpus = replace(
        run(teacher_share=0.5),
        manifest={"device": "cuda", "world_size": 2},
        fitting_spent=8.0,
    )
    assert cost_of_step(on_gpus) == pytest.approx(
        0.01
    )  # two GPUs for one second, half of it for the student
    assert baseline_length(on_gpus)["steps"] == pytest.approx(AIM * 100 * 10.0, abs=1)


def test_a_step_costs_what_it_takes_without_its_teacher_and_without_the_first_window():
    """In that one a network is compiled."""
    rows = [
        {"step": 10, "cpu_seconds": 500.0, "ms_teacher": 0.0, "ms_forward": 50.0},
        {"step": 60, "cpu_seconds": 560.0, "ms_teacher": 2.0, "ms_forward": 10.0},
        {"step": 110, "cpu_seconds": 600.0, "ms_teacher": 0.0, "ms_forward": 8.0},
    ]
    assert cost_of_step(run(train=rows)) == pytest.approx(0.9)
    assert cost_of_step(run(train=rows[:1])) == pytest.approx(50.0)
    assert (
        cost_of_step(run(train=[{"step": 10, "cpu_seconds": 5.0}])) == 0.5
    )  # a kd that recorded no milliseconds
    assert cost_of_step(run(train=[])) is None
