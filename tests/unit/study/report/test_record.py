"""Prices, differences and the summary of runs, against values worked out by hand and
published ones.
"""

from dataclasses import replace

import numpy as np
import pytest

from kd.core.intervals import Samples
from kd.core.scores import Scored
from kd.core.text import format_dollars
from kd.parts.tasks.embedding import SCORES as EMBEDDING
from kd.parts.tasks.single_label import SCORES as SINGLE_LABEL
from kd.study.report.confusion import short_names
from kd.study.report.page import render
from kd.study.report.record import (
    Predictions,
    RunRecord,
    differences,
    mean_cells,
    price_rows,
    seed_groups,
    teachers_of,
    verdicts,
)
from kd.study.report.report import summary

TRAIN = [
    {
        "step": step,
        "epoch": step // 10,
        "images": 32 * step,
        "seconds": 2.0 * step,
        "loss": 3 / step,
    }
    for step in (5, 10, 20)
]
VAL = [
    {
        "step": 10,
        "accuracy": 0.8,
        "teacher_accuracy": 0.9,
        "agreement": 0.7,
        "kl": 0.1,
        "ece": 0.05,
        "top5": 1.0,
    },
    {
        "step": 20,
        "accuracy": 0.75,
        "teacher_accuracy": 0.9,
        "agreement": 0.72,
        "kl": 0.1,
        "ece": 0.05,
        "top5": 1.0,
    },
]
EPOCHS = [{"trained": 320.0}, {"trained": 320.0}]


def run(name="one", manifest=None, **keys):
    return RunRecord(name, keys, manifest or {}, TRAIN, VAL, EPOCHS, SINGLE_LABEL)


def test_the_cost_of_a_run_by_hand():
    rented = run(
        manifest={"billable_seconds": 7200.0, "machines": 2}, **{"price.per_hour": 3.0}
    )
    assert rented.cost == pytest.approx(2 * 3.0 * 2)
    cheaper = run("two", {"billable_seconds": 3600.0}, **{"price.per_hour": 4.5})
    rows = price_rows([rented, cheaper, run("free")])
    assert rows[0]["USD"] == "12.00"
    dollars = (
        2 * 3.0 * 40 / 3600
    )  # issue 62: an epoch cost 6.00, with the teacher's fit and the baseline in it
    assert rows[0]["USD an epoch"] == format_dollars(dollars / 2)
    assert rows[0]["USD a point"] == format_dollars(12 / 80)
    assert [row["saving"] for row in rows] == ["-", f"{100 * (1 - 4.5 / 6):.1f} %", "-"]
    assert rows[2]["USD"] == "-"


def test_the_list_price_is_taken_unless_another_is_given():
    listed = run(**{"price.instance": "ml.g5.xlarge", "price.per_hour": 0.0})
    assert (
        listed.per_hour
        == run(**{"price.instance": "g5.xlarge", "price.per_hour": 0.0}).per_hour
        == 1.41
    )
    assert (
        run(**{"price.instance": "ml.g5.xlarge", "price.per_hour": 0.5}).per_hour == 0.5
    )
    assert listed.cost == pytest.approx(
        1.41 * 40 / 3600
    )  # nothing billed is recorded: the training time


def test_best_is_the_first_of_the_highest_score():
    assert run().best["step"] == 10
    assert (
        replace(run(), scored=Scored("val", 20, "", 40, 2, VAL[1], {})).best["step"]
        == 20
    ), "of the one that is used"
    assert replace(run(), chosen=20).best["step"] == 20, "the run has not ended"
    rows = [
        {"step": 1, "agreement": 0.5, "knn": 0.2},
        {"step": 2, "agreement": 0.4, "knn": 0.3},
    ]
    embedded = replace(run(), val=rows, scores=EMBEDDING)
    assert (embedded.selection_metric.key, embedded.best["step"]) == ("knn", 2)
    unlabelled = replace(
        embedded, val=[{"step": 1, "agreement": -0.5}, {"step": 2, "agreement": -0.25}]
    )
    assert (unlabelled.selection_metric.key, unlabelled.best["step"]) == (
        "agreement",
        2,
    )
    assert replace(run(), val=[]).best == {}


@pytest.mark.parametrize(
    ("keys", "unfinished"),
    [
        ({"run.epochs": 2}, ""),
        ({"run.epochs": 3}, "step 20, epoch 2 of 3"),
        ({"run.epochs": 9, "run.steps": 20}, ""),
        ({"run.epochs": 1, "run.steps": 1500}, "step 20 of 1,500"),
        ({}, ""),
    ],
)
def test_an_unfinished_run_says_where_it_stands(keys, unfinished):
    assert run(**keys).unfinished == unfinished
    if keys and not unfinished:
        assert replace(run(**keys), val=VAL[:1]).unfinished.startswith(
            "step 20"
        )  # killed before the last evaluation
        assert replace(run(**keys), train=[]).unfinished.startswith("step 0")


def test_the_axis_of_a_share_ends_at_100_percent():
    shares = replace(run(), val=[{**row, "accuracy": 1.0} for row in VAL])
    assert "105 %" not in render([shares])


def test_different_keys_are_listed():
    runs = run(a=1, b=2, **{"run.name": "x"}), run(a=1, b=3, c=4, **{"run.name": "y"})
    rows = differences(
        [replace(record, name=record.keys["run.name"]) for record in runs]
    )
    assert rows == [{"key": "b", "x": 2, "y": 3}, {"key": "c", "x": "-", "y": 4}]


def seeded(seed: int, accuracy: float, **keys) -> RunRecord:
    row = {
        "step": 1,
        "accuracy": accuracy,
        "teacher_accuracy": 0.221 + seed / 1000,
        "agreement": 0.5,
    }
    keys = {"run.seed": seed, "run.name": f"s{seed}", "losses": ["kl"], **keys}
    return RunRecord(
        f"s{seed}", keys, {"teacher": "one"}, TRAIN, [row], [], SINGLE_LABEL
    )


def test_runs_that_differ_in_the_seed_alone():
    group = [seeded(seed, accuracy) for seed, accuracy in enumerate((0.70, 0.72, 0.74))]
    unlike = seeded(3, 0.9, **{"optimizer.lr": 1.0})
    assert [
        [run.name for run in members] for members in seed_groups([*group, unlike])
    ] == [["s0", "s1", "s2"]]
    assert (
        seed_groups([group[0], group[0]]) == []
    )  # the same run twice is no second seed
    tested = replace(group[0], scored=Scored("test", 1, "a", 9, 1, group[0].val[0], {}))
    assert [
        [run.name for run in members] for members in seed_groups([tested, *group[1:]])
    ] == [["s1", "s2"]]
    # t = 4.303, standard deviation 2 points: 4.303 * 2 / sqrt(3)
    assert mean_cells(group)["accuracy"] == "72.0 ± 5.0 %"
    assert "accuracy 72.0 ± 5.0 %" in summary([*group, unlike])
    assert "mean of 3 seeds" in render([*group, unlike])


def test_a_seed_counts_once_in_the_mean_of_seeds():
    """A run made again, and a folder named twice, made the interval shorter: 12.706 x 2
    / sqrt(2) / sqrt(2).
    """
    seed_0 = seeded(0, 0.70)
    seed_1 = seeded(1, 0.72)
    again = replace(seeded(0, 0.90), name="again")
    (group,) = seed_groups([seed_0, again, seed_0, seed_1])
    assert group == [seed_0, seed_1]
    assert mean_cells(group)["accuracy"] == "71.0 ± 12.7 %"
    assert "Mean of 2 seeds (s0, s1)" in summary([seed_0, again, seed_0, seed_1])
    assert "mean of 2 seeds" in render([seed_0, again, seed_0, seed_1])
    assert seed_groups([seed_0, again]) == []


def test_a_strangers_findings_and_names_leave_the_terminal_alone():
    finding = {
        "rule": "X\x1b]0;owned\x07",
        "severity": "info",
        "evidence": "\x1b[2Jall\nfine",
        "advice": "a\u3000b",
    }
    record = replace(run("n\x1b[31m"), findings=[{**finding, "key": "k", "value": 1}])
    text = summary([record])
    assert "- **X?]0;owned?** (info): ?[2Jall?fine. a\u3000b" in text
    assert all(line.isprintable() or "\u3000" in line for line in text.split("\n"))


def test_a_teacher_that_runs_share_is_shown_once():
    """One teacher had two bars, of 22.1 and 22.2 %: its modes differ by rounding."""
    first = seeded(0, 0.5)
    second = seeded(1, 0.5)
    assert list(teachers_of([first, second])) == ["teacher"]
    page = render([first, second])
    assert page.count('title="teacher"') == 1
    assert "22.1 %" in page
    assert "22.2 %" not in page
    other_teacher = replace(second, manifest={"teacher": "another"})
    assert list(teachers_of([first, other_teacher])) == [
        "teacher of s0",
        "teacher of s1",
    ]


def test_names_are_cut_at_what_they_share():
    milk = [
        f"Packages/Milk/Arla-{kind}-Milk"
        for kind in ("Standard", "Ecological", "Lactose-Free-Medium-Fat")
    ]
    assert short_names(milk) == [
        "Arla-Standard-Milk",
        "Arla-Ecological-Milk",
        "Arla-Lact…edium-Fat-Milk",
    ]
    assert short_names(["a/Milk", "b/Milk", "Juice"]) == ["a/Milk", "b/Milk", "Juice"]
    numbered = [
        f"{'a very long beginning ' * 3}{i:03d}{' and an end' * 3}" for i in range(300)
    ]
    flat = [f"{'a very long beginning ' * 3}{i:03d}" for i in range(300)]
    assert len(set(short_names(flat))) == 300
    assert all(len(name) <= 24 for name in short_names([*flat, *numbered, *milk]))


def test_the_first_screen_has_the_numbers_asked_for_first():
    record = run(
        manifest={
            "parameters": {"student": 5.5e6, "teacher": 86.6e6},
            "date": "2026-11-22",
            "images": 36,
        }
    )
    graph = {
        "parity": {"model.onnx": {"cpu_ms": 1.25}},
        "files": {"model.onnx": {"bytes": 2**21}},
    }
    page = render([replace(record, exported=graph)]).partition("<section")[0]
    for text in (
        "2026-11-22",
        "36 training images",
        "chosen from 2 evaluations",
        "5.5 M",
        "86.6 M",
    ):
        assert text in page
    assert "1.25 ms" in page
    assert "per image on the CPU, model.onnx" in page


def test_the_size_of_a_graph_counts_its_weights():
    """Of openvino.xml the page once showed 0.095 MiB: its weights lie in
    openvino.bin.
    """
    sizes = {
        "openvino.xml": 99_615,
        "openvino.bin": 2_437_939,
        "model.onnx": 2**21,
        "later.graph": 2**20,
    }
    parity = {name: {"cpu_ms": 1.25} for name in sizes if name != "openvino.bin"}
    files = {name: {"bytes": size} for name, size in sizes.items()}
    page = render(
        [
            replace(
                run(),
                exported={"pick": "openvino.xml", "parity": parity, "files": files},
            )
        ]
    )
    assert "per image on the CPU, openvino.xml</span><small>2.42 MiB<" in page
    for name, size in {"model.onnx": "2 MiB", "later.graph": "1 MiB"}.items():
        assert (
            f'per image on the CPU, {name}</td><td>1.25 ms</td><td class="text">{size}<'
            in page
        )


def test_predictions_are_counted_by_class():
    answers = Predictions(
        ("fig", "pear", "plum"), [0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1], of=4
    )
    assert answers.accuracy(answers.student)[:2] == [0.5, 1.0]
    assert (
        answers.accuracy(answers.student)[2] != answers.accuracy(answers.student)[2]
    )  # nan: no image
    assert answers.confusion() == [[1, 1, 0], [0, 2, 0], [0, 0, 0]]


def test_where_the_time_went_sums_to_the_whole():
    rows = [
        {
            "step": 10,
            "steps": 10,
            "wall_ms": 100.0,
            "kind": "steady",
            "ms": {"data": 25.0, "teacher": 75.0},
        }
    ] * 2
    timed = replace(run(), timeline={0: rows})
    page = render([timed])
    assert "teacher 0.15 s (75.0 %)" in page
    assert "data 0.05 s (25.0 %)" in page


def last(
    right: int, teacher: int = 0, data: str = "images", images: int = 200
) -> Scored:
    """Return the last score of a model with so many right answers, the first ones,
    beside its teacher's.
    """
    models = (
        {"accuracy": right, "teacher_accuracy": teacher}
        if teacher
        else {"accuracy": right}
    )
    samples = {
        key: Samples(count / images, right=np.arange(images) < count)
        for key, count in models.items()
    }
    return Scored(
        "test",
        20,
        data,
        images,
        2,
        {key: sample.value for key, sample in samples.items()},
        samples,
    )


def test_the_conclusion_has_the_interval_of_each_model_and_of_their_difference():
    scored = last(140, 142)
    conclusion = SINGLE_LABEL.conclusion(scored)
    for sample in scored.samples.values():
        low, high = sample.interval()
        assert (
            f"{100 * sample.value:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
            in conclusion
        )
    assert (
        "the student against it -1.0 points (-2.9 to +0.9): no difference shown"
        in conclusion
    )
    two_models = {
        "accuracy": 0.7,
        "teacher_accuracy": 0.8,
        "teacher_accuracy_2": 0.9,
        "agreement": 0.6,
    }
    expected = "accuracy 70.0 % (teacher 80.0 %, teacher 2 90.0 %), agreement 60.0 %"
    assert SINGLE_LABEL.text(two_models) == expected


def test_better_requires_a_paired_interval_above_zero():
    first = replace(run("one"), scored=last(140, 142))
    assert verdicts([first]) == [
        "one against teacher: accuracy -1.0 points (-2.9 to +0.9): no difference shown"
    ]
    better = replace(run("more"), scored=last(150))
    assert "more against one: accuracy +5.0 points (+1.7 to +8.2): better" in verdicts(
        [first, better]
    )
    second = replace(run("two"), scored=last(120))
    elsewhere = replace(run("far"), scored=last(120, data="others"))
    assert verdicts([first, second, elsewhere, run("old")])[1:] == [
        "two against one: accuracy -10.0 points (-14.2 to -5.6): worse"
    ]


def test_classes_of_few_images_are_marked_and_absent_ones_named():
    labels = [0] * 30 + [1] * 5
    answers = Predictions(["often", "seldom", "never"], labels, labels, [], 35)
    page = render([replace(run(), answers=answers)])
    assert ">seldom *</span>" in page
    assert ">5 of 5</span>" in page, (
        "a percentage of five images says more than is known"
    )
    assert ">often</span>" in page
    assert ">100.0 %</span>" in page
    assert "* 1 of 3 classes have fewer than 20 images" in page
    assert (
        "1 of 3 classes have no image among the 35 images used, so nothing is known"
        " about them: never." in page
    )


def test_two_evaluations_make_no_curve():
    rows = [{"step": step, "accuracy": value} for step, value in ((5, 0.25), (10, 0.5))]
    page = render([RunRecord("one", {}, {}, [], rows, [], SINGLE_LABEL)])
    assert "<svg" not in page
    assert "50 %" in page
    assert "25 %" not in page
    rows.insert(0, {"step": 1, "accuracy": 0.125})
    assert "<svg" in render([RunRecord("one", {}, {}, [], rows, [], SINGLE_LABEL)])


def test_curves_mark_where_images_took_their_size():
    rows = [{"step": step, "accuracy": 0.1 * step} for step in (1, 2, 3)]
    train = [{"step": 3, "loss": 1.0, "epoch": 0, "images": 3, "seconds": 1.0}]
    keys = {"data.progressive.size": 32, "data.progressive.until": 0.6}
    for settings, marks in ({}, 0), ({"data.progressive.size": 0}, 0), (keys, 1):
        page = render([RunRecord("one", settings, {}, train, rows, [], SINGLE_LABEL)])
        assert page.count(">one: 32 px</text>") == marks
        assert page.count("stroke-dasharray") == marks


def test_the_page_has_the_table_of_graphs():
    speed = {
        "1": {
            "p50_ms": 3.0,
            "p99_ms": 4.0,
            "images_per_second": 300.0,
            "memory_mb": 90.0,
        }
    }
    graph_facts = {
        "title": "accuracy",
        "unit": "%",
        "score": 0.9,
        "interval": [0.85, 0.93],
        "agreement": 1.0,
        "bytes": 9,
    }
    facts = {
        "variants": {"model.onnx": {**graph_facts, "speed": speed}},
        "pick": "model.onnx",
    }
    assert "model.onnx (accepted)" in render([replace(run(), exported=facts)])
    assert "Which file to ship" not in render([run()])
