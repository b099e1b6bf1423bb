"""Whether distillation paid: only against labels alone of equal cost."""

from dataclasses import replace

import numpy as np
import pytest
from charted import charted

from kd.core.intervals import Samples, paired_interval, wilson_interval
from kd.core.scores import Scored
from kd.core.text import format_seconds
from kd.parts.tasks.single_label import SCORES
from kd.setup.provenance import chain_lines
from kd.study.report.page import render
from kd.study.report.record import RunRecord
from kd.study.report.summary import paying_verdict, summary_lines


def samples_of(right):
    return {"accuracy": Samples(right / 100, right=np.arange(100) < right)}


def run(right, cpu_seconds, steps=100, **changes):
    row = {"step": steps, "epoch": 1, "images": steps, "seconds": 7.0}
    row |= {} if cpu_seconds is None else {"cpu_seconds": cpu_seconds}
    samples = samples_of(right)
    scored = Scored("test", 1, "", 100, 1, {"accuracy": right / 100}, samples)
    record = RunRecord(
        "one",
        {},
        {"device": "cpu"},
        [row],
        [{"step": steps, "accuracy": right / 100}],
        [],
        SCORES,
    )
    return replace(record, scored=scored, **changes)


def line(
    distilled,
    alone,
    cost: float | None = 60.0,
    had: float | None = 60.0,
    steps=100,
    **changes,
):
    return paying_verdict(
        run(distilled, cost, baseline=run(alone, had, steps), **changes)
    )


@pytest.mark.parametrize(
    ("distilled", "alone", "expected"),
    [
        (80, 60, "Pays from 1 min 00 s of CPU time on"),
        (60, 80, "Does not pay within this run"),
        (61, 60, "Not shown to pay within this run"),
    ],
)
def test_a_verdict_is_cautious_where_the_interval_holds_0(distilled, alone, expected):
    low, high = paired_interval(
        max(0, distilled - alone), max(0, alone - distilled), 100
    )
    verdict = line(distilled, alone, had=57.0)
    assert verdict.startswith(
        f"{expected}: accuracy {distilled - alone:+}.0 points ({100 * low:+.1f} to"
        f" {100 * high:+.1f})"
    )
    assert "for 1 min 00 s of CPU time against 57 s" in verdict
    assert paying_verdict(run(80, 60.0)) == ""


@pytest.mark.parametrize(
    ("keys", "hard"),
    [({"losses.1.hard": True}, True), ({"losses.0.hard": False}, False)],
)
def test_a_verdict_names_what_was_learned_where_it_was_the_class_alone(keys, hard):
    assert (
        "from the teacher's class (hard) against labels alone"
        in line(80, 60, keys=keys)
    ) == hard
    assert ("hard" in line(80, 60, keys=keys)) == hard


@pytest.mark.parametrize(
    ("changes", "cost"),
    [
        ({}, 60),
        ({"fitting_spent": 90.0}, 150),  # a fitted teacher costs its fit
        (
            {
                "manifest": {
                    "device": "cpu",
                    "at_hand": {"outputs": 9, "cpu_seconds": 30.0},
                }
            },
            90,
        ),  # stored earlier
        (
            {
                "fitting_spent": 30.0,
                "manifest": {"at_hand": {"outputs": 9, "cpu_seconds": 30.0}},
            },
            120,
        ),
    ],
)
def test_a_cheaper_baseline_gives_no_verdict_but_a_key(changes, cost):
    assert line(80, 60, had=0.91 * cost, **changes).startswith(
        f"Pays from {format_seconds(cost)}"
    )
    verdict = line(80, 60, had=0.5 * cost, steps=300, **changes)
    assert verdict.startswith("No verdict")
    assert "ays" not in verdict
    assert "`run.baseline_steps=600`" in verdict  # twice as long


def test_each_part_has_its_cost_and_the_time_on_the_wall_where_one_passed():
    verdict = line(
        80,
        60,
        had=200.0,
        manifest={"device": "cpu", "at_hand": {"outputs": 9, "cpu_seconds": 30.0}},
    )
    student_cost = "the student with new outputs 1 min 00 s (7 s)"
    alone = "labels alone 3 min 20 s (7 s)."
    assert verdict.endswith(f": outputs at hand 30 s, {student_cost}, {alone}")


def test_unrecorded_costs_give_no_verdict():
    """Rows of an older kd; a fit that is gone; outputs of an accelerator, which no
    clock of the CPU timed.
    """
    assert line(80, 60, cost=None).startswith("No verdict")
    assert line(80, 60, had=None).startswith("No verdict")
    assert line(80, 60, fitting_spent=None).startswith("No verdict")
    unknown = {"device": "cpu", "at_hand": {"outputs": 9, "cpu_seconds": None}}
    assert line(80, 60, manifest=unknown).startswith("No verdict")


def test_beside_an_accelerator_its_time_counts():
    alone = run(60, 1.0, manifest={"device": "cuda", "world_size": 2})
    verdict = paying_verdict(
        run(80, 500.0, baseline=alone, manifest={"device": "cuda", "world_size": 2})
    )
    assert verdict.startswith("Pays from 14 s of device time on")
    assert "for 14 s of device time against 14 s" in verdict


def graded(scores, each=2.0, **changes):
    """A run of 100 steps with these validation scores, evenly spaced; a step takes
    `each` CPU seconds.
    """
    steps = [round(100 * (i + 1) / len(scores)) for i in range(len(scores))]
    train = [
        {
            "step": step,
            "epoch": 1,
            "images": step,
            "seconds": 1.0,
            "cpu_seconds": each * step,
        }
        for step in steps
    ]
    val = [
        {"step": step, "accuracy": score}
        for step, score in zip(steps, scores, strict=True)
    ]
    manifest = {"device": "cpu", "validation_images": 10_000}
    return replace(
        run(round(100 * scores[-1]), 0.0),
        train=train,
        val=val,
        manifest=manifest,
        **changes,
    )


RISING = [i / 20 for i in range(20)]
FLAT = [0.2, *[0.5] * 19]


@pytest.mark.parametrize(
    ("distilled", "alone", "form"),
    [
        (
            RISING,
            FLAT,
            "Pays from 2 min 50 s of CPU time on",
        ),  # 50 s of fit; 0.55 first beats 0.5, after 60 steps
        (FLAT, RISING, "Does not pay: the student has stopped"),
        ([score - 0.01 for score in FLAT], FLAT, "Not shown to pay: both have stopped"),
        (
            [score / 2 for score in RISING],
            FLAT,
            "Not within this run: the student is still learning",
        ),
        ([score / 2 for score in FLAT], FLAT, "Does not pay: both have stopped"),
    ],
)
def test_a_verdict_says_from_where_it_pays_by_the_form_of_the_curves(
    distilled, alone, form
):
    """Labels alone that have stopped are held level: no verdict needs a longer run of
    them.
    """
    verdict = paying_verdict(
        graded(distilled, fitting_spent=50.0, baseline=graded(alone, each=2.4))
    )
    assert verdict.startswith(f"{form}: accuracy ")
    assert "for 4 min 10 s of CPU time against 4 min 00 s" in verdict
    verdict = paying_verdict(
        graded(distilled, fitting_spent=50.0, baseline=graded(alone, each=1.0))
    )
    assert verdict.startswith("No verdict" if alone is RISING else f"{form}: accuracy ")


def test_a_report_has_both_curves_as_a_table_and_says_whether_the_student_had_stopped():
    record = graded(
        RISING,
        fitting_spent=50.0,
        baseline=graded(FLAT),
        keys={"teacher.cache.views": 4},
    )
    lines = summary_lines(record)
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in "\n".join(lines).splitlines()
        if "|" in line
    ]
    curves = cells[[row[0] for row in cells].index("total CPU time") + 2 :]
    # 250 s in six rows; the student's first point is at 50 + 10 s
    assert [row[0] for row in curves] == [
        "42 s",
        "1 min 23 s",
        "2 min 05 s",
        "2 min 47 s",
        "3 min 28 s",
        "4 min 10 s",
    ]
    assert [row[1] for row in curves] == [
        "-",
        "10.0 %",
        "30.0 %",
        "50.0 %",
        "70.0 %",
        "95.0 %",
    ]
    assert [row[2] for row in curves] == ["50.0 %"] * 6
    assert "The student was still learning" in lines[-2]
    assert (
        "`run.epochs=3x` takes about 10 min 00 s of CPU time, with the stored outputs"
        in lines[-2]
    )
    page = render([record])
    assert "<h2>Does it pay</h2>" in page
    assert "still learning" in page
    chart = charted(page, record.name)
    assert list(chart)[1:] == ["distilled", "labels alone", "labels alone, best"]
    assert "CPU time" in next(iter(chart))
    steps = zip(next(iter(chart.values())), chart["distilled"], strict=True)
    assert [x for x, score in steps if score is not None] == [
        50.0 + 10 * i for i in range(1, 21)
    ]
    assert {*chart["labels alone, best"]} == {0.5}
    assert (
        "`run.steps=3x`" in summary_lines(graded(RISING, keys={"run.steps": 100}))[-2]
    )
    assert "had stopped learning" in summary_lines(graded(FLAT))[-2]
    assert (
        "not known: 2 evaluations are too few" in summary_lines(graded([0.5, 0.6]))[-2]
    )


def test_a_cell_has_an_interval_where_samples_are_known():
    row = {"accuracy": 0.7, "agreement": 0.9}
    (low, high) = wilson_interval(0.7, 100)
    expected = {
        "accuracy": f"70.0 % ({100 * low:.1f} to {100 * high:.1f})",
        "agreement": "90.0 %",
    }
    assert SCORES.cells(row, samples_of(70)) == expected
    assert SCORES.cells(row) == expected | {"accuracy": "70.0 %"}


def test_the_chain_of_an_export_names_each_part_and_what_it_was_compared_with():
    scores = {"columns": SCORES.record(), "pair": {"agreement": 0.9}, "split": "test"}
    facts = {
        "chain": {
            "teacher": {
                "members": {"teacher": {"name": "vit", "source": "timm"}},
                "weights": "a" * 64,
            },
            "answers": {"count": 120, "cache": "b" * 64},
            "student": {
                "is": "student",
                "run": "food",
                "step": 90,
                "weights": "c" * 64,
                "exported": "d" * 64,
            },
            "graphs": {"model.onnx": "e" * 64},
        },
        "licences": {"teacher": "mit"},
        "scores": scores,
        "calibration": {"temperature": 1.25},
        "parity": {
            "model.onnx": {"same_top1": 63, "images": 64, "max_difference": 2e-6}
        },
    }
    lines = chain_lines(facts)
    assert [line.split()[0] for line in lines if not line.startswith("  | ")] == [
        "teacher",
        "outputs",
        "student",
        "calibrated",
        "graph",
    ]
    for number, words in (
        (0, "vit (timm), licence mit, weights aaaa"),
        (2, "120 in the cache bbbb"),
        (3, "90.0 %"),
        (4, "run food, step 90, weights cccc"),
        (5, "divided by 1.25"),
        (7, "on 63 of 64 images, largest difference 2.0e-06"),
        (8, "model.onnx eeee"),
    ):
        assert words in lines[number]
    assert "licence unknown" in chain_lines({**facts, "licences": {}})[0]
    live = {**facts, "chain": {**facts["chain"], "answers": {}}}
    assert "ran live" in chain_lines(live)[1]
    assert chain_lines({}) == []
