"""Show the scores of a sweep's students against their milliseconds.

All finished students and the sweep's teacher are timed in turns, after all training.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
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
from kd.study.sweeps.costs import measure_costs, student_of
from kd.study.sweeps.search import Goal, on_pareto_front
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


def with_costs(trials: Trials, rows: Sequence[Row]) -> tuple[list[Row], Row]:
    """Return the rows of trials with their students' costs, and the teacher's row.

    The teacher's may be {}. A finished student has `ms`, `mb` (10^6 bytes),
    `parameters`, whether it is on the `frontier`, `number` (by `ms`), and `labels_only`
    if it has a baseline; one without a graph has `untimed`, the reason. Times are kept
    in the study until other trials end or the machine changes.
    """
    costs = _stored_costs(trials, rows)
    key = rows[0]["key"]
    costed_rows = []
    for row in rows:
        name = row["trial"]
        costed_rows.append({**row, **costs.get(name, {})})
        baseline = RunDir(trials.folder / name).baseline().path.name
        scores = trials.last_row(f"{name}/{baseline}")
        if key in scores:
            costed_rows[-1]["labels_only"] = scores[key]
    _number(trials.goal, key, costed_rows)
    teachers = trials.goal.scores.of_teachers(trials.last_row(rows[0]["trial"]))
    score = teachers.get(TEACHER, {}).get(key)
    if TEACHER not in costs or score is None:
        return costed_rows, {}
    return costed_rows, {"score": score, **costs[TEACHER]}


def _stored_costs(trials: Trials, rows: Sequence[Row]) -> dict[str, Row]:
    """Return the costs that the study keeps, or measure them."""
    ended = {row["trial"]: trials.trial(row) for row in rows if "pruned" not in row}
    of = {"trials": sorted(ended), "processor": processor()}
    stored = trials.study.user_attrs.get("costs", {})
    if stored.get("of") != of:
        stored = {"of": of, "costs": _costs(trials.folder, ended)}
        trials.study.set_user_attr("costs", stored)
    return stored["costs"]


def _number(goal: Goal, key: str, rows: Sequence[Row]) -> None:
    """Add to timed rows their number by `ms` and whether they are on the frontier."""
    order = sorted((row for row in rows if "ms" in row), key=lambda row: row["ms"])
    if not goal.objectives:
        goal = replace(goal, objectives=("ms", key))
    points = [
        [row["score"] if name == key else row[name] for name in goal.objectives]
        for row in order
    ]
    holds = on_pareto_front(points, goal.directions)
    for number, (row, hold) in enumerate(zip(order, holds, strict=True), 1):
        row |= {"number": number, "frontier": hold}


def cost_cells(rows: Sequence[Row], column: Column) -> list[dict[str, str]]:
    """Return the table cells of `with_costs` rows; [] if nothing was measured."""
    if not any("ms" in row or "untimed" in row for row in rows):
        return [{} for _ in rows]
    columns: list[tuple[str, str, Callable[..., str]]] = [
        ("number", "point", str),
        ("ms", "ms", "{:.3g}".format),
        ("mb", "MB", "{:.2f}".format),
        ("parameters", "parameters", "{:,}".format),
    ]
    if any("labels_only" in row for row in rows):
        columns.append(("labels_only", "labels only", column.text))
    return [
        {title: form(row[key]) if key in row else "-" for key, title, form in columns}
        for row in rows
    ]


def write_frontier(
    rows: Sequence[Row], teacher: Row, column: Column, folder: Path
) -> str:
    """Write frontier.svg of `with_costs` rows; return the text below their table."""
    if not any("ms" in row for row in rows):
        return "No student could be timed."
    write_text(folder / "frontier.svg", frontier_svg(rows, teacher, column))
    return f"{NOTE.format(processor())} `{folder / 'frontier.svg'}` shows the points."


def frontier_svg(rows: Sequence[Row], teacher: Row, column: Column) -> str:
    """Return score against milliseconds as SVG; at least one row must be timed."""
    order = sorted((row for row in rows if "ms" in row), key=lambda row: row["number"])
    frontier = [row for row in order if row["frontier"]]
    behind = [row for row in order if not row["frontier"]]
    labels_only = [
        (row["ms"], row["labels_only"]) for row in order if "labels_only" in row
    ]
    groups = [
        _points("frontier", frontier),
        _points("others", behind),
        Points("labels only", COLORS["labels only"], labels_only),
    ]
    levels = []
    if teacher:
        levels.append(Level(TEACHER, COLORS[TEACHER], y=teacher["score"]))
    if "ms" in teacher:
        place = (teacher["ms"], teacher["score"])
        groups.append(Points(TEACHER, COLORS[TEACHER], [place], [TEACHER]))
    x = [row["ms"] for row in frontier]
    y = [row["score"] for row in frontier]
    stairs = Series("frontier", COLORS["frontier"], x, y)
    notes = []
    for row in order:
        values = ", ".join(value_texts(row["values"]).values())
        score = column.text(row["score"])
        notes.append(f"{row['number']}  {values}: {row['ms']:.3g} ms, {score}")
    notes.append("upright: 95 % intervals")
    axes = Axis("ms of CPU time per image", log=True), Axis(unit=column.unit)
    return points(groups, SIZE, axes, levels, stairs, notes).svg(FILE)


def _points(name: str, rows: Sequence[Row]) -> Points:
    """Return rows as numbered points with their intervals."""
    at = [(row["ms"], row["score"]) for row in rows]
    numbers = [str(row["number"]) for row in rows]
    intervals = [row.get("interval") for row in rows]
    return Points(name, COLORS[name], at, numbers, intervals)


def value_texts(values: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a trial as text, in place of a `student` section its keys.

    They are its model, arguments and weights.
    """
    texts = dict(values)
    if "student" in texts:
        student = parse_value(f"student={texts['student']}")
        words = [str(student.get("model", ""))]
        words += [f"{key}={value}" for key, value in student.get("args", {}).items()]
        for key in ("init", "checkpoint"):
            if key in student:
                words.append(f"{key}={student[key]}")
        texts["student"] = " ".join(words)
    return texts


def _costs(folder: Path, ended: Mapping[str, Trial]) -> dict[str, Row]:
    """Return the costs of each trial and of the shared teacher.

    They are `ms`, `mb` and `parameters`, or `untimed`, the reason.
    """
    loads: dict[str, Callable[[], Classifier]] = {}
    sides = {}
    first_names: dict[str, str] = {}
    for name, trial in ended.items():
        if first_names.setdefault(student_alike(trial), name) == name:
            loads[name] = partial(student_of, folder, trial)
            sides[name] = trial.config.data.image_size
    trials = [*ended.values()]
    first = trials[0]
    teachers = {repr(trial.config.teacher) for trial in trials}
    if first.config.teacher.model and len(teachers) == 1:
        loads[TEACHER] = partial(_teacher, first)
        sides[TEACHER] = first.config.data.image_size
    log.info("sweep: %d models are timed in turns", len(loads))
    costs = measure_costs(loads, sides)
    for name, trial in ended.items():
        costs[name] = costs[first_names[student_alike(trial)]]
    return costs


def _teacher(trial: Trial) -> Classifier:
    """Load the teacher of a trial, if it is a single network in one process."""
    recipe = resolve(trial.config)
    model = None
    # a teacher in several processes may not fit into one's memory
    if not (recipe.teacher.shard or recipe.teacher.pipeline):
        model = load_fitted(recipe, open_sources(recipe.data)).model
    if not isinstance(model, Classifier):
        raise ModelError(
            "teacher",
            "is not a single torch network in one process, so it has no graph",
        )
    return model
