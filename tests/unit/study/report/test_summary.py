"""Whether distillation paid: only against labels alone of equal cost."""

from dataclasses import replace

import numpy as np
import pytest

from kd.core.intervals import Samples, paired, wilson
from kd.core.scores import Scored
from kd.parts.tasks.single_label import SCORES
from kd.study.report.record import RunRecord
from kd.study.report.summary import chain_lines, verdict


def of(right):
    return {"accuracy": Samples(right / 100, right=np.arange(100) < right)}


def run(right, cpu_seconds, steps=100, **changes):
    row = {"step": steps, "epoch": 1, "images": steps, "seconds": 7.0}
    row |= {} if cpu_seconds is None else {"cpu_seconds": cpu_seconds}
    samples = of(right)
    scored = Scored("test", 1, "", 100, 1, {"accuracy": right / 100}, samples)
    made = RunRecord("one", {}, {"device": "cpu"}, [row], [{"step": 1, "accuracy": right / 100}], [], SCORES)
    return replace(made, scored=scored, **changes)


def line(distilled, alone, cost: float | None = 60.0, had: float | None = 60.0, steps=100, **changes):
    return verdict(run(distilled, cost, baseline=run(alone, had, steps), **changes))


@pytest.mark.parametrize(
    ("distilled", "alone", "expected"),
    [(80, 60, "Distillation paid"), (60, 80, "Distillation did not pay"), (61, 60, "Not shown to have paid")],
)
def test_a_verdict_is_cautious_where_the_interval_holds_0(distilled, alone, expected):
    low, high = paired(max(0, distilled - alone), max(0, alone - distilled), 100)
    said = line(distilled, alone, had=57.0)
    assert said.startswith(
        f"{expected}: accuracy {distilled - alone:+}.0 points ({100 * low:+.1f} to {100 * high:+.1f})"
    )
    assert "for the same CPU time (1 min 00 s against 57 s)" in said
    assert verdict(run(80, 60.0)) == ""


@pytest.mark.parametrize(("keys", "named"), [({"losses.1.hard": True}, True), ({"losses.0.hard": False}, False)])
def test_a_verdict_names_what_was_learned_where_it_was_the_class_alone(keys, named):
    assert ("from the teacher's class (hard) against labels alone" in line(80, 60, keys=keys)) == named
    assert ("hard" in line(80, 60, keys=keys)) == named


@pytest.mark.parametrize(
    ("changes", "cost"),
    [
        ({}, 60),
        ({"fitting_spent": 90.0}, 150),  # a fitted teacher costs its fit
        ({"manifest": {"device": "cpu", "at_hand": {"outputs": 9, "cpu_seconds": 30.0}}}, 90),  # stored earlier
        ({"fitting_spent": 30.0, "manifest": {"at_hand": {"outputs": 9, "cpu_seconds": 30.0}}}, 120),
    ],
)
def test_a_cheaper_baseline_gives_no_verdict_but_a_key(changes, cost):
    assert line(80, 60, had=0.91 * cost, **changes).startswith("Distillation paid")
    said = line(80, 60, had=0.5 * cost, steps=300, **changes)
    assert said.startswith("No verdict")
    assert "paid" not in said
    assert "`run.baseline_steps=600`" in said  # twice as long
    assert "which made 300 steps" in said
    assert "at equal steps" in line(80, 60, had=0.5 * cost, **changes)


def test_each_part_has_its_cost_and_the_time_on_the_wall_where_one_passed():
    said = line(80, 60, had=200.0, manifest={"device": "cpu", "at_hand": {"outputs": 9, "cpu_seconds": 30.0}})
    own, alone = "the student with new outputs 1 min 00 s (7 s)", "labels alone 3 min 20 s (7 s)."
    assert said.endswith(f": outputs at hand 30 s, {own}, {alone}")


def test_unrecorded_costs_give_no_verdict():
    """Rows of an older kd; a fit that is gone; outputs of an accelerator, which no clock of the CPU timed."""
    assert line(80, 60, cost=None).startswith("No verdict")
    assert line(80, 60, had=None).startswith("No verdict")
    assert line(80, 60, fitting_spent=None).startswith("No verdict")
    unknown = {"device": "cpu", "at_hand": {"outputs": 9, "cpu_seconds": None}}
    assert line(80, 60, manifest=unknown).startswith("No verdict")


def test_beside_an_accelerator_its_time_counts():
    alone = run(60, 1.0, manifest={"device": "cuda", "world_size": 2})
    said = verdict(run(80, 500.0, baseline=alone, manifest={"device": "cuda", "world_size": 2}))
    assert said.startswith("Distillation paid")
    assert "for the same device time (14 s against 14 s)" in said


def test_an_earlier_baseline_of_equal_steps_is_reported_too():
    said = line(70, 80, equal_steps=of(60))
    assert said.startswith("Distillation did not pay: accuracy -10.0 points")
    assert "at equal steps +10.0 points" in said


def test_a_cell_has_an_interval_where_samples_are_known():
    row, (low, high) = {"accuracy": 0.7, "agreement": 0.9}, wilson(0.7, 100)
    expected = {"accuracy": f"70.0 % ({100 * low:.1f} to {100 * high:.1f})", "agreement": "90.0 %"}
    assert SCORES.cells(row, of(70)) == expected
    assert SCORES.cells(row) == expected | {"accuracy": "70.0 %"}


def test_the_chain_of_an_export_names_each_part_and_what_it_was_compared_with():
    scores = {"columns": SCORES.record(), "pair": {"agreement": 0.9}, "split": "test"}
    facts = {
        "chain": {
            "teacher": {"members": {"teacher": {"name": "vit", "source": "timm"}}, "weights": "a" * 64},
            "answers": {"count": 120, "cache": "b" * 64},
            "student": {"is": "student", "run": "food", "step": 90, "weights": "c" * 64, "exported": "d" * 64},
            "graphs": {"model.onnx": "e" * 64},
        },
        "licences": {"teacher": "mit"},
        "scores": scores,
        "calibration": {"temperature": 1.25},
        "parity": {"model.onnx": {"same_top1": 63, "images": 64, "max_difference": 2e-6}},
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
