"""How small a student may be: the frontier, its picture, what the clock says, and which
trials are compared.
"""

import json
import random
import re
from dataclasses import replace
from itertools import product
from xml.etree import ElementTree

import pytest
import torch
from optuna.study import StudyDirection
from pieces import Asks
from test_sweeps import end, trials_of
from torch import nn

from kd import config
from kd.config.flat import plain
from kd.core.errors import ModelError, RunError
from kd.core.host import processor
from kd.core.scores import Column
from kd.models import runtimes
from kd.models.classifier import Classifier
from kd.study.sweeps import frontier
from kd.study.sweeps.costs import measure_costs
from kd.study.sweeps.frontier import (
    COLORS,
    cost_cells,
    frontier_svg,
    value_texts,
    write_frontier,
)
from kd.study.sweeps.search import on_pareto_front
from kd.study.sweeps.space import Space, student_alike
from kd.study.sweeps.sweep import sweep

SMALLER = StudyDirection.MINIMIZE
LARGER = StudyDirection.MAXIMIZE
ACCURACY = Column("accuracy", "accuracy")
SVG = "{http://www.w3.org/2000/svg}"


def rows_of(seed: int, count: int, smaller: bool = False) -> list[dict]:
    """Return rows as `with_costs` does, from chance; costs and scores are apart."""
    draw = random.Random(seed)
    costs = sorted(0.3 * 1.37 ** (i + draw.random() / 2) for i in range(count))
    scores = [draw.randint(10, 90) / 100 for _ in costs]
    holds = on_pareto_front(
        list(zip(costs, scores, strict=True)), [SMALLER, SMALLER if smaller else LARGER]
    )
    return [
        {
            "trial": f"t{i}",
            "values": {"student": json.dumps({"model": "a<b", "args": {"width": i}})},
            "score": score,
            "interval": [score - 0.02, score + 0.03],
            "ms": ms,
            "mb": 1.5,
            "parameters": 1000 + i,
            "number": i + 1,
            "frontier": hold,
        }
        for i, (ms, score, hold) in enumerate(zip(costs, scores, holds, strict=True))
    ]


@pytest.mark.parametrize("smaller", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_the_frontier_is_what_its_definition_gives(seed, smaller):
    draw = random.Random(seed)
    points = [
        (draw.randint(1, 6), draw.randint(1, 6)) for _ in range(draw.randint(1, 12))
    ]

    def better(first: float, second: float) -> bool:
        return first < second if smaller else first > second

    expected = []
    for ms, score in points:
        beaten = False
        for other_ms, other_score in points:
            as_good = other_ms <= ms and not better(score, other_score)
            beaten |= as_good and (other_ms < ms or better(other_score, score))
        expected.append(not beaten)
    assert (
        on_pareto_front(points, [SMALLER, SMALLER if smaller else LARGER]) == expected
    )
    assert any(expected)


def at(element: ElementTree.Element) -> tuple[float, float]:
    """Return the place of a mark."""
    x, y = re.findall(r"[-\d.]+", element.get("transform", ""))[:2]
    return float(x), float(y)


def marks_of(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    """Return the marks of a kind, such as `mark-symbol role-mark`."""
    return [
        mark
        for group in root.iter(f"{SVG}g")
        if group.get("class", "").startswith(kind)
        for mark in group
    ]


def place_of(root: ElementTree.Element, axis: int) -> list[tuple[float, float]]:
    """Return position and number of each label of the x axis (0) or the y axis (1)."""
    labels = [mark for mark in marks_of(root, "mark-text role-axis-label") if mark.text]
    middle = [
        mark for mark in labels if (mark.get("text-anchor") == "end") == bool(axis)
    ]
    return [
        (at(mark)[axis] - 3 * axis, float(mark.text.removesuffix(" %")))
        for mark in middle
    ]


def read_off(marks: list[tuple[float, float]], place: float) -> float:
    """Return the number at a position, from the first and the last mark."""
    (low, a) = marks[0]
    (high, b) = marks[-1]
    return a + (place - low) / (high - low) * (b - a)


@pytest.mark.parametrize("seed", range(5))
def test_the_points_of_the_picture_are_the_numbers_of_the_rows(seed):
    rows = rows_of(seed, 8)
    teacher = {"score": 0.95, "ms": 30.0}
    rows[3]["labels_only"] = 0.07
    root = ElementTree.fromstring(
        frontier_svg([*rows, {"trial": "gone"}], teacher, ACCURACY)
    )
    x_marks = [
        (place, torch.tensor(value).log10().item())
        for place, value in place_of(root, 0)
    ]
    y_marks = place_of(root, 1)
    drawn = [
        (
            10 ** read_off(x_marks, at(point)[0]),
            read_off(y_marks, at(point)[1]) / 100,
            point.get("fill"),
        )
        for point in marks_of(root, "mark-symbol role-mark")
    ]
    expected = [
        (row["ms"], row["score"], "frontier" if row["frontier"] else "others")
        for row in rows
    ]
    expected += [(rows[3]["ms"], 0.07, "labels only"), (30.0, 0.95, "teacher")]
    assert len(drawn) == len(expected)
    for (ms, score, color), point in zip(sorted(drawn), sorted(expected), strict=True):
        assert ms == pytest.approx(point[0], rel=0.01)
        assert score == pytest.approx(point[1], abs=0.005)
        assert COLORS[point[2]] == color
    texts = [
        "".join(element.itertext())
        for kind in ("text", "tspan")
        for element in root.iter(f"{SVG}{kind}")
    ]
    for row in rows:
        line = next(
            text for text in texts if text.startswith(f"{row['number']}  a<b width=")
        )
        assert f"{row['ms']:.3g} ms, {100 * row['score']:.1f} %" in line


def test_the_table_shows_what_was_measured_and_nothing_where_nothing_was(tmp_path):
    rows = rows_of(2, 2)
    rows[0]["labels_only"] = 0.5
    untimed = {"trial": "slow"}
    first, second, third = cost_cells([*rows, untimed], ACCURACY)
    assert first == {
        "point": "1",
        "ms": f"{rows[0]['ms']:.3g}",
        "MB": "1.50",
        "parameters": "1,000",
        "labels only": "50.0 %",
    }
    assert second["labels only"] == "-"
    assert set(third.values()) == {"-"}
    assert cost_cells([untimed, untimed], ACCURACY) == [{}, {}]
    assert "could be timed" in write_frontier([untimed], {}, ACCURACY, tmp_path)
    assert not list(tmp_path.iterdir())
    assert str(tmp_path / "frontier.svg") in write_frontier(
        rows, {}, ACCURACY, tmp_path
    )


def test_a_student_is_named_by_its_model_and_arguments():
    text = (
        '{"kind": "torch", "model": "mine:net", "args": {"width": 8, "depths": [1, 2]},'
        ' "mean": [0, 0, 0], "init": "a"}'
    )
    values = {"student": text, "optimizer.lr": "1e-3"}
    assert value_texts(values) == {
        "student": "mine:net width=8 depths=[1, 2] init=a",
        "optimizer.lr": "1e-3",
    }
    assert value_texts({"student.model": "vit"}) == {"student.model": "vit"}
    assert values["student"] == text


def linear(features: int) -> Classifier:
    """Return a network whose cost is that of a product with so many features."""
    network = nn.Sequential(
        nn.Flatten(),
        nn.Linear(3 * 16 * 16, features),
        nn.ReLU(),
        nn.Linear(features, 3),
    )
    return Classifier(network, 3, 16)


def test_models_are_timed_as_the_graphs_that_are_exported():
    torch.manual_seed(0)
    small = linear(8)
    large = linear(4096)

    def gone() -> Classifier:
        raise ModelError("student", "is gone")

    loads = {
        "small": lambda: small,
        "large": lambda: large,
        "none": lambda: Classifier(Asks(), 3, 16),
        "gone": gone,
    }
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        costs = measure_costs(loads, dict.fromkeys(loads, 16))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert costs["gone"] == {"untimed": "student: is gone."}
    assert "cannot express" in costs["none"]["untimed"]
    for name, model in (("small", small), ("large", large)):
        assert costs[name]["parameters"] == sum(
            parameter.numel() for parameter in model.parameters()
        )
        assert costs[name]["mb"] == len(runtimes.exported(model, 16)) / 1e6
    assert 0 < costs["small"]["ms"] < costs["large"]["ms"]  # 512 times the arithmetic


@pytest.mark.parametrize("text", ["", '{"thr', "5"])
def test_damaged_files_of_a_sweep_are_named(text, settings, tmp_path):
    settings["run"]["folder"] = str(tmp_path)
    folder = tmp_path / "tiny_sweep"
    folder.mkdir()
    (folder / "sweep.json").write_text(text)
    with pytest.raises(
        RunError, match=r"^run\.folder: '.*sweep\.json' is damaged .* Remove the file\."
    ):
        sweep(settings, "student.args.depth=1,2")
    (folder / "sweep.json").unlink()
    (folder / "journal.log").write_text("{}\n" + (text or "no") + "\n")
    with pytest.raises(
        RunError, match=r"^run\.folder: '.*journal\.log' is damaged .* Remove it"
    ):
        sweep(settings, "student.args.depth=1,2")


@pytest.mark.parametrize(
    ("key", "objectives", "holds"),
    [
        ("accuracy", (), [True, False, False]),
        ("ece", (), [True, True, False]),
        ("accuracy", ("accuracy", "mb"), [True, False, True]),
    ],
)
def test_the_frontier_of_a_sweep_is_that_of_its_objectives(
    key, objectives, holds, settings, tmp_path
):
    """Here the costs of three trials are known already."""
    trials = trials_of(settings, ["student.args.depth=1,2,3"], tmp_path, key)
    both = zip(trials.space.combinations(), (0.3, 0.1, 0.2), strict=True)
    names = [end(trials, values, score) for values, score in both]
    trials.goal = replace(trials.goal, objectives=objectives)
    stored = {"of": {"trials": sorted(names), "processor": processor()}}
    stored["costs"] = {
        name: {"ms": 1.0 + i, "mb": 3.0 - i} for i, name in enumerate(names)
    }
    trials.study.set_user_attr("costs", stored)
    rows, teacher = frontier.with_costs(trials, trials.rows())
    marks = {row["number"]: row["frontier"] for row in rows}
    assert [marks[number] for number in (1, 2, 3)] == holds
    assert teacher == {}


def test_costs_are_measured_again_where_the_machine_changed(
    settings, tmp_path, monkeypatch
):
    trials = trials_of(settings, ["student.args.depth=1,2"], tmp_path)
    name = end(trials, trials.space.combinations()[0], 0.5)
    trials.study.set_user_attr(
        "costs",
        {
            "of": {"trials": [name], "processor": "another"},
            "costs": {name: {"ms": 9.0}},
        },
    )
    monkeypatch.setattr(
        frontier,
        "_costs",
        lambda folder, ended: {trial: {"untimed": "again"} for trial in ended},
    )
    (row,), _ = frontier.with_costs(trials, trials.rows())
    assert row["untimed"] == "again"
    assert trials.study.user_attrs["costs"]["of"]["processor"] == processor()


STUDENTS = "student={model: resnet10t, args: {width: 3}},{model: lcnet_050}"


def test_a_mapping_is_merged_and_no_argument_of_another_network_stays(settings):
    settings["student"] |= {"attention": "fused"}
    space = Space.read(settings, [STUDENTS, "student.compile=off", "run.seed=3"])
    sections = [space.load(values).student for values in space.combinations()]
    assert [
        (section.model, section.args, section.attention, section.compile)
        for section in sections
    ] == [
        ("resnet10t", {"width": 3}, "fused", "off"),
        ("lcnet_050", {}, "fused", "off"),
    ]
    assert "args" in settings["student"], "what was passed in stays"
    space = Space.read(settings, ["student={args: {depth: 1}},{args: {depth: 2}}"])
    own_args = settings["student"]["args"]
    for depth, values in enumerate(space.combinations(), 1):
        assert space.load(values).student.args == {**own_args, "depth": depth}
        assert space.load(values) == config.load(
            settings, [f"student={values['student']}"]
        ), "as kd-train reads it"


def test_contents_keep_references_and_the_name_of_the_file(tmp_path, monkeypatch):
    file = tmp_path / "mine.yaml"
    file.write_text("data: {root: '${oc.env:PHOTOS}'}\nstudent: {model: a}\n")
    assert plain(file) == {
        "data": {"root": "${oc.env:PHOTOS}"},
        "student": {"model": "a"},
        "run": {"name": "mine"},
    }
    assert plain({"run": {"name": "own", "seed": 1}})["run"] == {
        "name": "own",
        "seed": 1,
    }
    file.write_text("run: {name: other}\n")
    assert plain(file)["run"]["name"] == "other"
    assert plain({"run": 5})["run"] == 5


def test_students_that_cost_the_same_are_alike(settings):
    space = Space.read(
        settings,
        ["optimizer.lr=1e-3,1e-2", "student.args.depth=1,2", "run.baseline=true"],
    )
    trials = [space.trial(values, "tiny_sweep", []) for values in space.combinations()]
    for (i, first), (j, second) in product(enumerate(trials), repeat=2):
        assert (student_alike(first) == student_alike(second)) == (i % 2 == j % 2)
    assert not any(trial.config.run.baseline for trial in trials)
    assert space.trial(
        trials[0].values, "tiny_sweep", [], baseline=True
    ).config.run.baseline
    other_space = Space.read(settings, ["data.image_size=16,32"])
    assert (
        len(
            {
                student_alike(other_space.trial(values, "", []))
                for values in other_space.combinations()
            }
        )
        == 2
    )
