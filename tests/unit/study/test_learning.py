"""Was a student still learning? By hand-made curves."""

import math

import pytest

from kd.study.learning import LONGER, judge_learning


def curve(score, evaluations=20):
    return [
        (i / evaluations, score(i / evaluations)) for i in range(1, evaluations + 1)
    ]


def test_the_growth_between_two_parts_is_carried_on_with_the_logarithm_of_the_steps():
    """Where the score is a straight line over log(steps), a run three times as long
    gains the slope times log(3).
    """
    for images in (100, 1000, 10_000):
        error = math.sqrt(0.4 * 0.6 / images)
        for times, expected in (
            (0.8, "stopped"),
            (1.5, "unknown"),
            (2.5, "learning"),
            (-2.5, "stopped"),
        ):
            slope = times * error / math.log(LONGER)
            answer = judge_learning(
                curve(lambda at, slope=slope: 0.4 + slope * math.log(at / 0.675), 200),
                images,
            ).answer
            assert answer == expected


def test_the_decay_at_the_end_is_no_learning_and_neither_is_the_start():
    assert (
        judge_learning(curve(lambda at: 0.5 if at < 0.8 else 0.6), 1000).answer
        == "stopped"
    )
    assert (
        judge_learning(curve(lambda at: 0.1 if at < 0.2 else 0.6), 1000).answer
        == "stopped"
    )


@pytest.mark.parametrize(
    ("validation", "answer"),
    [
        (
            (
                "30.5 32 34.5 41.5 39 40 33 34 37.5 35 38 40 36.5 37.5 40.5 39 40 39.5"
                " 40.5 40"
            ),
            "stopped",
        ),
        (
            (
                "31 35.5 43.5 41.5 48 45 46.5 51 44 54 48 54 55 54 54.5 53.5 54 53.5 53"
                " 52.5"
            ),
            "learning",
        ),
    ],
)
def test_two_runs_of_the_study_of_curves_are_judged_rightly(validation, answer):
    """Ten classes, 200 validation images: labels alone for 3,000 steps, and a distilled
    student of 40 epochs.
    """
    scores = [float(score) / 100 for score in validation.split()]
    assert (
        judge_learning(
            [((i + 1) / 20, score) for i, score in enumerate(scores)], 200
        ).answer
        == answer
    )


@pytest.mark.parametrize(
    ("evaluations", "images", "reason"),
    [(5, 1000, "5 evaluations"), (20, 0, "not recorded")],
)
def test_it_cannot_always_tell(evaluations, images, reason):
    judgement = judge_learning(curve(lambda at: at, evaluations), images)
    assert judgement.answer == "unknown"
    assert reason in judgement.reason
