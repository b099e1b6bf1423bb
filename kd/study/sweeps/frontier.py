"""Score against milliseconds of a sweep's students, as table columns and as a picture.

All finished students and the sweep's teacher are timed in turns, after all training.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
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
from kd.study.report.svg import Series, esc, lines, standalone
from kd.study.sweeps.costs import student_of, timed
from kd.study.sweeps.search import front
from kd.study.sweeps.space import Trial, student_alike
from kd.study.sweeps.trials import Trials

TEACHER = "teacher"
WIDTH, HEIGHT, LINE = 720, 360, 18  # size of the picture, and height of a line below it, pixels
COLORS = {"--c1": "#2f6fde", "--rest": "#98a2b3", "--c2": "#d9822b", "--teacher": "#8e5bd0"}
NOTE = (
    "ms: CPU time of an image in onnxruntime on one thread of {}, all models in turns, the median. MB: the graph, "
    "weights included. frontier: no other student is as accurate and faster, or as fast and more accurate."
)
Row = dict[str, Any]
log = logging.getLogger("kd")


def measured(tried: Trials, rows: Sequence[Row]) -> tuple[list[Row], Row]:
    """Return the rows of trials with their students' costs, and the teacher's row or {}.

    A finished student has `ms`, `mb` (10^6 bytes), `parameters`, whether it is on the `frontier`, `number` (by `ms`),
    and `labels_only` if it has a baseline; one without a graph has `untimed`, the reason. Times are kept in the study
    until other trials end or the machine changes.
    """
    ended = {row["trial"]: tried.trial(row) for row in rows if "pruned" not in row}
    of = {"trials": sorted(ended), "processor": processor()}
    known = tried.study.user_attrs.get("costs", {})
    if known.get("of") != of:
        known = {"of": of, "costs": _costs(tried.folder, ended)}
        tried.study.set_user_attr("costs", known)
    costs, key, with_costs = known["costs"], rows[0]["key"], []
    for row in rows:
        alone = tried.last_row(f"{row['trial']}/{RunDir(tried.folder / row['trial']).alone().path.name}")
        baseline = {"labels_only": alone[key]} if key in alone else {}
        with_costs.append({**row, **costs.get(row["trial"], {}), **baseline})
    order = sorted((row for row in with_costs if "ms" in row), key=lambda row: row["ms"])
    goal = tried.goal
    if not goal.objectives:
        goal = replace(goal, objectives=("ms", key))
    holds = front(
        [[row["score"] if name == key else row[name] for name in goal.objectives] for row in order], goal.directions
    )
    for number, (row, hold) in enumerate(zip(order, holds, strict=True), 1):
        row |= {"number": number, "frontier": hold}
    score = tried.goal.scores.of_teachers(tried.last_row(rows[0]["trial"])).get(TEACHER, {}).get(key)
    return with_costs, {} if TEACHER not in costs or score is None else {"score": score, **costs[TEACHER]}


def cells(rows: Sequence[Row], column: Column) -> list[dict[str, str]]:
    """Return the table cells of `measured` rows; [] if nothing was measured."""
    if not any("ms" in row or "untimed" in row for row in rows):
        return [{} for _ in rows]
    shown = {"number": ("point", str), "ms": ("ms", "{:.3g}".format), "mb": ("MB", "{:.2f}".format)}
    shown |= {"parameters": ("parameters", "{:,}".format)}
    shown |= {"labels_only": ("labels only", column.text)} if any("labels_only" in row for row in rows) else {}
    return [{title: form(row[key]) if key in row else "-" for key, (title, form) in shown.items()} for row in rows]


def write(rows: Sequence[Row], teacher: Row, column: Column, folder: Path) -> str:
    """Write the picture of `measured` rows, frontier.svg, and return the text below their table."""
    if not any("ms" in row for row in rows):
        return "No student could be timed."
    write_text(folder / "frontier.svg", picture(rows, teacher, column))
    return f"{NOTE.format(processor())} `{folder / 'frontier.svg'}` shows the points."


def picture(rows: Sequence[Row], teacher: Row, column: Column) -> str:
    """Return score against milliseconds as an SVG file; at least one row must be timed."""
    order, series = sorted((row for row in rows if "ms" in row), key=lambda row: row["number"]), []
    front = [(row["ms"], row["score"]) for row in order if row["frontier"]]
    stairs = [front[0], *(corner for last, now in pairwise(front) for corner in ((now[0], last[1]), now))]
    ends = [teacher.get("ms", order[0]["ms"]), *(row["ms"] for row in order)]
    for row in order:
        at, color = row["ms"], "--c1" if row["frontier"] else "--rest"
        series.append(Series("", color, [at], [row["score"]], label=str(row["number"])))
        series += [Series("", color, [at, at], row["interval"])] if "interval" in row else []
        series += [Series("", "--c2", [at], [row["labels_only"]])] if "labels_only" in row else []
    series += [Series("", "--c1", [x for x, _ in stairs], [y for _, y in stairs])] if len(stairs) > 1 else []
    if teacher:
        series.append(Series("", "--teacher", [min(ends), max(ends)], [teacher["score"]] * 2, dashed=True))
        series += [Series("", "--teacher", ends[:1], [teacher["score"]], label=TEACHER)] if "ms" in teacher else []
    what = [", ".join(named(row["values"]).values()) for row in order]
    both = zip(order, what, strict=True)
    names = [f"{row['number']}  {one}: {row['ms']:.3g} ms, {column.text(row['score'])}" for row, one in both]
    names.append("blue: the frontier; grey: the others; orange: labels only; dashed: the teacher; 95 % intervals")
    texts = [f'<text x="12" y="{HEIGHT + LINE * i}">{esc(name)}</text>' for i, name in enumerate(names, 1)]
    made = lines(series, (WIDTH, HEIGHT), "ms of CPU time an image", column.unit, log=True)
    made = made.replace(f' {HEIGHT}"', f' {HEIGHT + LINE * (len(names) + 1)}"', 1)  # of the viewBox
    return standalone(made, COLORS, "".join(texts))


def named(values: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a trial as text; for a `student` section its model, arguments and weights."""
    shown = dict(values)
    if "student" in shown:
        one = parse_value(f"student={shown['student']}")
        own = {**one.get("args", {}), **{key: one[key] for key in ("init", "checkpoint") if key in one}}
        shown["student"] = " ".join([str(one.get("model", "")), *(f"{key}={value}" for key, value in own.items())])
    return shown


def _costs(folder: Path, ended: Mapping[str, Trial]) -> dict[str, Row]:
    """Return `ms`, `mb` and `parameters` of each trial and of the shared teacher, or `untimed`, the reason."""
    alike: dict[str, list[str]] = {}
    for name, trial in ended.items():
        alike.setdefault(student_alike(trial), []).append(name)
    first = {names[0]: ended[names[0]] for names in alike.values()}
    loads = {name: partial(student_of, folder, trial) for name, trial in first.items()}
    sides = {name: trial.config.data.image_size for name, trial in first.items()}
    some = next(iter(ended.values()))
    if some.config.teacher.model and len({repr(trial.config.teacher) for trial in ended.values()}) == 1:
        loads[TEACHER], sides[TEACHER] = partial(_teacher, some), some.config.data.image_size
    log.info("sweep: %d models are timed in turns", len(loads))
    costs = timed(loads, sides)
    return {**costs, **{name: costs[names[0]] for names in alike.values() for name in names}}


def _teacher(trial: Trial) -> Classifier:
    recipe = resolve(trial.config)
    spread = recipe.teacher.shard or recipe.teacher.pipeline  # the teacher may not fit into one process's memory
    model = None if spread else load_fitted(recipe, open_sources(recipe.data)).model
    if not isinstance(model, Classifier):
        raise ModelError("teacher", "is not a single torch network in one process, so it has no graph")
    return model
