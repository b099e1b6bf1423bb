"""A task whose columns nobody knows is shown everywhere, without an `if` for it."""

import re
from dataclasses import replace

from kd.core.scores import Column, Scored, Scores
from kd.parts.tasks import embedding, single_label
from kd.study.report.page import render
from kd.study.report.record import RunRecord, price_rows
from kd.study.report.report import summary as text

DEPTH = Scores(
    own=(
        Column("delta1", "within a quarter"),
        Column("mae", "mean absolute error", ""),
    ),
    pair=(
        Column("gap", "gap", "m", "mean distance from the teacher"),
        Column("bias", "bias", "m"),
    ),
    note="Depths of pixels, in metres.",
)
VAL = [
    {
        "step": 5,
        "delta1": 0.75,
        "mae": 0.375,
        "teacher_delta1": 0.875,
        "teacher_mae": 0.125,
        "gap": 0.5,
        "bias": 0.25,
    },
    {
        "step": 9,
        "delta1": 0.5,
        "mae": 0.625,
        "teacher_delta1": 0.875,
        "teacher_mae": 0.125,
        "gap": 0.75,
        "bias": 0.0,
    },
]
ALONE = [{"step": 9, "delta1": 0.25, "mae": 0.8125}]
TRAIN = [
    {"step": step, "epoch": 0, "images": 8 * step, "seconds": step, "loss": 1 / step}
    for step in (5, 9)
]


def words(text: str) -> str:
    return " ".join(text.split())


def record(name: str = "depth", **changes) -> RunRecord:
    alone = RunRecord("alone", {}, {}, TRAIN, ALONE, [], DEPTH)
    return replace(
        RunRecord(
            name, {"price.per_hour": 1.0}, {}, TRAIN, VAL, [], DEPTH, baseline=alone
        ),
        **changes,
    )


def test_a_run_may_go_on_with_other_gpus_and_hide_its_cores():
    begun = {
        "time": 1.0,
        "cpu": [],
        "memory_mib": 9.0,
        "gpu": [{"utilization": 50.0}, {"utilization": 70.0}],
    }
    rows = [begun, begun | {"time": 2.0, "gpu": [{"utilization": 90.0}]}]
    page = render([record(monitor={"host_0": rows})])
    assert "GPU 0" in page
    assert "GPU 1" not in page


def test_the_text_has_the_scores_of_each_model():
    rows = [{**TRAIN[0], "images": 200}, {**TRAIN[1], "images": 360}]
    sizes = {"parameters": {"student": 2_000_000, "teacher": 8_000_000}}
    single = record(manifest=sizes, train=rows, keys={"run.seed": 0, "run.steps": 9})
    lines = words(text([single]))
    assert "| model | within a quarter | mean absolute error |" in lines
    assert "| teacher | 87.5 % | 0.1250 | 8.00 M | - |" in lines
    assert "| student, distilled | 75.0 % | 0.3750 | 2.00 M | 40 |" in lines
    assert "| student, labels only | 25.0 % | 0.8125 |" in lines
    assert "gap 0.5000 m (mean distance from the teacher), bias 0.2500 m." in lines
    assert "by within a quarter 75.0 %; seed 0; 9 s of training" in lines
    assert "Not evaluated yet." in text([replace(single, val=[])])


def test_text_leaves_out_absent_labels_and_teachers():
    unlabelled = words(text([record(val=[{"step": 9, "gap": 0.5}], baseline=None)]))
    assert "| model | parameters | training images/s |" in unlabelled
    assert "| student, distilled | - | 8 |" in unlabelled
    assert "by gap 0.5000 m; seed 0" in unlabelled
    alone = words(text([record(val=ALONE, baseline=None)]))
    assert "| student | 25.0 % |" in alone
    assert "teacher" not in alone


def test_the_text_has_each_of_several_teachers():
    row = {**VAL[0], "teacher_delta1_2": 1.0, "teacher_mae_2": 0.0}
    lines = words(
        text(
            [
                record(
                    val=[row],
                    manifest={"parameters": {"student": 1, "teacher": 8_000_000}},
                )
            ]
        )
    )
    assert (
        "| teacher | 87.5 % | 0.1250 | - |" in lines
    )  # the parameters are of both together
    assert "| teacher 2 | 100.0 % | 0.0000 | - |" in lines


def test_prices_are_by_point_of_a_share_alone():
    (row,) = price_rows([record()])
    assert row["score"] == "within a quarter 75.0 %"
    assert row["USD a point"] != "-"
    (unlabelled,) = price_rows([record(val=[{"step": 5, "gap": 0.5}])])
    assert (unlabelled["score"], unlabelled["USD a point"]) == (
        "gap 0.5000 m",
        "-",
    )  # metres are no points


def test_the_page_has_tiles_and_each_score():
    page = render([record()])
    tiles = re.findall(
        r'<div class="tile"><b>(.*?)</b><span>(.*?)</span><small>(.*?)</small>', page
    )
    assert [tile[:2] for tile in tiles[:4]] == [
        ("75.0 %", "validation within a quarter"),
        ("87.5 %", "validation within a quarter, teacher"),
        ("25.0 %", "validation within a quarter, labels only"),
        (tiles[3][0], "gap"),
    ]
    assert len(tiles) <= 6
    for label, value, note in (
        ("validation mean absolute error, teacher", "0.1250", ""),
        (
            "validation within a quarter, chosen from 2 evaluations",
            "75.0 %",
            "on this split, which flatters it",
        ),
        ("bias", "0.2500 m", ""),
    ):
        assert f'<td>{label}</td><td>{value}</td><td class="text">{note}</td>' in page
    for title in ("within a quarter", "mean absolute error", "gap"):
        assert f"<h3>Validation {title}</h3>" in page
    assert "<td>0.8125</td>" in page  # of the baseline
    assert "accuracy" not in page


def test_a_page_of_two_tasks_has_a_chart_of_each():
    """One has the agreement as a share, the other as a cosine: a chart each."""
    rows = [{"step": 5, "agreement": 0.5}, {"step": 9, "agreement": 0.75}]
    first = record("one", val=rows, scores=single_label.SCORES)
    second = replace(first, name="two", scores=embedding.SCORES)
    page = render([first, second, record("three")])
    assert page.count("<h3>Validation agreement</h3>") == 2
    for cell in ("75.0 %", "0.7500"):
        assert f"<td>{cell}</td>" in page


def test_all_models_are_compared_on_the_images_of_the_last_score():
    """The baseline's best validation score and its test score differ; beside a test
    score stands a test score.
    """

    def scored(value: float, **scores: float) -> Scored:
        return Scored(
            "test", 9, "d", 400, 2, {"delta1": value, "mae": 0.5, **scores}, {}
        )

    base = record()
    assert base.baseline is not None
    alone = replace(base.baseline, scored=scored(0.11))
    lines = words(
        text(
            [
                record(
                    scored=scored(
                        0.66, teacher_delta1=0.77, teacher_mae=0.5, gap=0.5, bias=0.0
                    ),
                    baseline=alone,
                )
            ]
        )
    )
    assert "On 400 test images" in lines
    for line in (
        "| teacher | 77.0 %",
        "| student, distilled | 66.0 %",
        "| student, labels only | 11.0 %",
    ):
        assert line in lines
    for value in ("25.0 %", "75.0 %", "87.5 %"):  # of the validation images
        assert f"| {value}" not in lines
