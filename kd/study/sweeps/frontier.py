"""Score against milliseconds of a sweep's students, as table columns and as a picture.

All finished students and the sweep's teacher are timed in turns, after all training.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kd.config.yaml_text import parse_value
from kd.core.errors import ModelError
from kd.core.host import processor
from kd.core.scores import Column
from kd.files.run_dir import RunDir
from kd.files.storage import write_text
from kd.models.classifier import Classifier
from kd.setup.build_teacher import load_fitted
from kd.setup.data import open_sources
from kd.setup.recipe import resolve
from kd.study.report.charts import FILE, Axis, Level, Points, Series, points
from kd.study.sweeps.costs import student_of, timed
from kd.study.sweeps.search import front
from kd.study.sweeps.space import Trial, student_alike
from kd.study.sweeps.trials import Trials

TEACHER = "teacher"
SIZE = (660, 300)  # of the plot, pixels
COLORS = {
    "frontier": "#2f6fde",
    "others": "#98a2b3",
    "labels only": "#d9822b",
    TEACHER: "#8e5bd0",
}
NOTE = (
    "ms: CPU time per image in onnxruntime on one thread of {}, all models in turns,"
    " the median. MB: the graph, weights included. frontier: no other student is as"
    " accurate and faster, or as fast and more accurate."
)
Row = dict[str, Any]
log = logging.getLogger("kd")


def measured(tried: Trials, rows: Sequence[Row]) -> tuple[list[Row], Row]:
    """Return the rows of trials with their students' costs, and the teacher's row or
    {}.

    A finished student has `ms`, `mb` (10^6 bytes), `parameters`, whether it is on the
    `frontier`, `number` (by `ms`), and `labels_only` if it has a baseline; one without
    a graph has `untimed`, the reason. Times are kept in the study until other trials
    end or the machine changes.
    """
    ended = {row["trial"]: tried.trial(row) for row in rows if "pruned" not in row}
    of = {"trials": sorted(ended), "processor": processor()}
    known = tried.study.user_attrs.get("costs", {})
    if known.get("of") != of:
        known = {"of": of, "costs": _costs(tried.folder, ended)}
        tried.study.set_user_attr("costs", known)
    costs, key, with_costs = known["costs"], rows[0]["key"], []
    for row in rows:
        alone = tried.last_row(
            f"{row['trial']}/{RunDir(tried.folder / row['trial']).baseline().path.name}"
        )
        baseline = {"labels_only": alone[key]} if key in alone else {}
        with_costs.append({**row, **costs.get(row["trial"], {}), **baseline})
    order = sorted(
        (row for row in with_costs if "ms" in row), key=lambda row: row["ms"]
    )
    goal = tried.goal
    if not goal.objectives:
        goal = replace(goal, objectives=("ms", key))
    holds = front(
        [
            [row["score"] if name == key else row[name] for name in goal.objectives]
            for row in order
        ],
        goal.directions,
    )
    for number, (row, hold) in enumerate(zip(order, holds, strict=True), 1):
        row |= {"number": number, "frontier": hold}
    score = (
        tried.goal.scores.of_teachers(tried.last_row(rows[0]["trial"]))
        .get(TEACHER, {})
        .get(key)
    )
    return with_costs, (
        {}
        if TEACHER not in costs or score is None
        else {"score": score, **costs[TEACHER]}
    )


def cells(rows: Sequence[Row], column: Column) -> list[dict[str, str]]:
    """Return the table cells of `measured` rows; [] if nothing was measured."""
    if not any("ms" in row or "untimed" in row for row in rows):
        return [{} for _ in rows]
    shown = {
        "number": ("point", str),
        "ms": ("ms", "{:.3g}".format),
        "mb": ("MB", "{:.2f}".format),
    }
    shown |= {"parameters": ("parameters", "{:,}".format)}
    shown |= (
        {"labels_only": ("labels only", column.text)}
        if any("labels_only" in row for row in rows)
        else {}
    )
    return [
        {
            title: form(row[key]) if key in row else "-"
            for key, (title, form) in shown.items()
        }
        for row in rows
    ]


def write(rows: Sequence[Row], teacher: Row, column: Column, folder: Path) -> str:
    """Write the picture of `measured` rows, frontier.svg, and return the text below
    their table.
    """
    if not any("ms" in row for row in rows):
        return "No student could be timed."
    write_text(folder / "frontier.svg", picture(rows, teacher, column))
    return f"{NOTE.format(processor())} `{folder / 'frontier.svg'}` shows the points."


def picture(rows: Sequence[Row], teacher: Row, column: Column) -> str:
    """Return score against milliseconds as an SVG file; at least one row must
    be timed.
    """
    order = sorted((row for row in rows if "ms" in row), key=lambda row: row["number"])
    front = [row for row in order if row["frontier"]]
    others = [row for row in order if not row["frontier"]]
    labels_only = [
        (row["ms"], row["labels_only"]) for row in order if "labels_only" in row
    ]
    groups = [
        _points("frontier", front),
        _points("others", others),
        Points("labels only", COLORS["labels only"], labels_only),
    ]
    levels = []
    if teacher:
        levels.append(Level(TEACHER, COLORS[TEACHER], y=teacher["score"]))
    if "ms" in teacher:
        groups.append(
            Points(
                TEACHER, COLORS[TEACHER], [(teacher["ms"], teacher["score"])], [TEACHER]
            )
        )
    stairs = Series(
        "frontier",
        COLORS["frontier"],
        [row["ms"] for row in front],
        [row["score"] for row in front],
    )
    lines = []
    for row in order:
        values = ", ".join(named(row["values"]).values())
        lines.append(
            f"{row['number']}  {values}: {row['ms']:.3g} ms,"
            f" {column.text(row['score'])}"
        )
    lines.append("upright: 95 % intervals")
    axes = Axis("ms of CPU time per image", log=True), Axis(unit=column.unit)
    chart = points(groups, SIZE, axes, levels, stairs, lines)
    return chart.svg(FILE)


def _points(name: str, rows: Sequence[Row]) -> Points:
    """Return rows as numbered points with their intervals."""
    at = [(row["ms"], row["score"]) for row in rows]
    intervals = [row.get("interval") for row in rows]
    return Points(
        name, COLORS[name], at, [str(row["number"]) for row in rows], intervals
    )


def named(values: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a trial as text; for a `student` section its model,
    arguments and weights.
    """
    shown = dict(values)
    if "student" in shown:
        one = parse_value(f"student={shown['student']}")
        own = {
            **one.get("args", {}),
            **{key: one[key] for key in ("init", "checkpoint") if key in one},
        }
        shown["student"] = " ".join(
            [
                str(one.get("model", "")),
                *(f"{key}={value}" for key, value in own.items()),
            ]
        )
    return shown


def _costs(folder: Path, ended: Mapping[str, Trial]) -> dict[str, Row]:
    """Return `ms`, `mb` and `parameters` of each trial and of the shared teacher, or
    `untimed`, the reason.
    """
    alike: dict[str, list[str]] = {}
    for name, trial in ended.items():
        alike.setdefault(student_alike(trial), []).append(name)
    first = {names[0]: ended[names[0]] for names in alike.values()}
    loads = {name: partial(student_of, folder, trial) for name, trial in first.items()}
    sides = {name: trial.config.data.image_size for name, trial in first.items()}
    some = next(iter(ended.values()))
    if (
        some.config.teacher.model
        and len({repr(trial.config.teacher) for trial in ended.values()}) == 1
    ):
        loads[TEACHER], sides[TEACHER] = (
            partial(_teacher, some),
            some.config.data.image_size,
        )
    log.info("sweep: %d models are timed in turns", len(loads))
    costs = timed(loads, sides)
    return {
        **costs,
        **{name: costs[names[0]] for names in alike.values() for name in names},
    }


def _teacher(trial: Trial) -> Classifier:
    recipe = resolve(trial.config)
    spread = (
        recipe.teacher.shard or recipe.teacher.pipeline
    )  # the teacher may not fit into one process's memory
    model = None if spread else load_fitted(recipe, open_sources(recipe.data)).model
    if not isinstance(model, Classifier):
        raise ModelError(
            "teacher",
            "is not a single torch network in one process, so it has no graph",
        )
    return model
