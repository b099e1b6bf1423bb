"""How small may a student be? Score against milliseconds of the students of a sweep, as columns and as a picture.

Each student that came to its end becomes a graph of onnxruntime as `kd-export` writes it. The exporter's clock times
all of them in turns, with the teacher of the sweep, once nothing trains any more.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kd.artifacts.run_dir import RunDir
from kd.errors import KdError, ModelError
from kd.export.parity import cpu_ms
from kd.files.storage import write_json, write_text
from kd.host import processor
from kd.models import runtimes
from kd.models.classifier import Classifier
from kd.models.teacher import count_parameters
from kd.report.svg import Spot, esc, scatter
from kd.scores import Column
from kd.setup.data import open_sources
from kd.setup.finished import best_student
from kd.setup.recipe import BASELINE, resolve
from kd.setup.teacher import load_fitted
from kd.sweeps.space import Trial, student_alike
from kd.sweeps.trials import Trials

TEACHER = "teacher"
SECONDS = 2.0
"""For which the clock runs at most, times the number of models."""
SIZE, LINE = (720, 360), 18
"""Of the picture, and of a line below it, pixels."""
STYLE = (
    "<style>svg{--c1:#2f6fde;--c2:#d9822b;--teacher:#8e5bd0;background:#fff;font:13px system-ui,sans-serif}"
    "text{fill:#475467}.grid{stroke:#e4e7ec}.line{fill:none;stroke-width:2}.dashed{stroke-dasharray:2 5}</style>"
)
NOTE = (
    "ms: CPU time of an image in onnxruntime on one thread of {}, all models in turns, the median. MB: the graph, "
    "weights included. frontier: no other student is as accurate and faster, or as fast and more accurate."
)
Row = dict[str, Any]
log = logging.getLogger("kd")


def differ(trials: Sequence[Trial]) -> bool:
    """Return whether trials train different students."""
    return len({student_alike(trial) for trial in trials}) > 1


def measured(tried: Trials, rows: Sequence[Row]) -> tuple[list[Row], Row]:
    """Return the rows of trials, the best first, with what their students cost, and the row of the teacher or {}.

    Rows gain `ms`, `mb` (10^6 bytes), `parameters`, `frontier`, `number` (by `ms`) and, where it was trained, `labels_only`: the score of the
    student without its teacher. A row that ended early gains nothing; of a model that is no graph `untimed` says why.
    What the clock has shown lies in frontier.json until other trials end, or another machine asks.
    """
    trials = {trial.name: trial for trial in tried.trials}
    ended = {row["trial"]: trials[row["trial"]] for row in rows if not row["why"]}
    file, of = tried.folder / "frontier.json", {"trials": sorted(ended), "processor": processor()}
    known = json.loads(file.read_text()) if file.is_file() else {}
    if known.get("of") != of:
        known = {"of": of, "costs": _costs(tried, ended)}
        write_json(file, known)
    costs, column = known["costs"], tried.column()
    found = [{**row, **costs.get(row["trial"], {}), **_labels_only(tried, row, column)} for row in rows]
    order = sorted((row for row in found if "ms" in row), key=lambda row: row["ms"])
    holds = members([(row["ms"], row["score"]) for row in order], column.smaller)
    for i, row in enumerate(order):
        row |= {"number": i + 1, "frontier": holds[i]}
    return found, _teacher_row(tried, rows[0], column, costs.get(TEACHER))


def members(points: Sequence[tuple[float, float]], smaller: bool = False) -> list[bool]:
    """Return whether each (ms, score) is on the frontier: none is as good in both, and better in one.

    `smaller`: a smaller score is better.
    """
    signed = [(ms, score if smaller else -score) for ms, score in points]
    return [not any(a <= ms and b <= score and (a, b) != (ms, score) for a, b in signed) for ms, score in signed]


def cells(rows: Sequence[Row], column: Column) -> list[dict[str, str]]:
    """Return the cells of `measured` rows in the table of the sweep; none where nothing was measured."""
    if not any("ms" in row or "untimed" in row for row in rows):
        return [{} for _ in rows]
    shown = {"number": ("#", str), "ms": ("ms", "{:.3g}".format), "mb": ("MB", "{:.2f}".format)}
    shown |= {"parameters": ("parameters", "{:,}".format)}
    shown |= {"labels_only": ("labels only", column.text)} if any("labels_only" in row for row in rows) else {}
    return [{title: form(row[key]) if key in row else "-" for key, (title, form) in shown.items()} for row in rows]


def write(rows: Sequence[Row], teacher: Row, column: Column, folder: Path) -> str:
    """Write the picture of `measured` rows, frontier.svg, and return what stands below their table."""
    if not any("ms" in row for row in rows):
        return "No student could be timed."
    write_text(folder / "frontier.svg", picture(rows, teacher, column))
    return f"{NOTE.format(processor())} `{folder / 'frontier.svg'}` shows them by their #."


def picture(rows: Sequence[Row], teacher: Row, column: Column) -> str:
    """Return score against milliseconds as an SVG file; one row at least was timed."""
    spots, names = [], []
    for row in sorted((row for row in rows if "ms" in row), key=lambda row: row["number"]):
        at = row["ms"]
        spots.append(Spot(f"{row['number']}", "--c1", at, row["score"], row.get("interval", ()), row["frontier"]))
        spots += [Spot("", "--c2", at, row["labels_only"], filled=False)] if "labels_only" in row else []
        names.append(f"{row['number']}  {_name(row)}: {at:.3g} ms, {column.text(row['score'])}")
    stairs = [spot for spot in spots if spot.color == "--c1" and spot.filled]
    names.append("filled: the frontier, with 95 % intervals" + "; dashed: the teacher" * bool(teacher))
    names[-1] += "; orange: labels only" * any(spot.color == "--c2" for spot in spots)
    spots += [Spot(TEACHER, "--teacher", teacher["ms"], teacher["score"])] if "ms" in teacher else []
    levels = {"--teacher": teacher["score"]} if teacher else {}
    made = scatter(spots, stairs, levels, SIZE, "ms of CPU time an image", column.unit)
    lines = [f'<text x="12" y="{SIZE[1] + LINE * i}">{esc(name)}</text>' for i, name in enumerate(names, 1)]
    box = 'viewBox="0 0 {} {}"'
    made = made.replace(box.format(*SIZE), box.format(SIZE[0], SIZE[1] + LINE * (len(names) + 1)), 1)
    made = made.replace("</svg>", "".join(lines) + "</svg>")
    return made.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1).replace(">", f">{STYLE}", 1)


def _name(row: Row) -> str:
    pairs = [f"{key.rpartition('.')[2]}={text}" for key, text in row["values"].items()]
    return re.sub(r'[{}"]', "", ", ".join(pairs).replace("student=", "").replace("model=", ""))


def _costs(tried: Trials, ended: Mapping[str, Trial]) -> dict[str, Row]:
    """Return `ms`, `mb` and `parameters` of each trial and of the teacher that all share, or `untimed`: why not."""
    alike: dict[str, list[str]] = {}
    for name, trial in ended.items():
        alike.setdefault(student_alike(trial), []).append(name)
    loads: dict[str, tuple[Callable[[], Classifier], int]] = {}
    for first in (names[0] for names in alike.values()):
        loads[first] = partial(_student, tried, ended[first]), ended[first].config.data.image_size
    one = next(iter(ended.values()))
    if one.config.teacher.model and len({repr(trial.config.teacher) for trial in ended.values()}) == 1:
        loads[TEACHER] = partial(_teacher, one), one.config.data.image_size
    log.info("sweep: %d models are timed in turns", len(loads))
    costs = timed(loads)
    return {**costs, **{name: costs[names[0]] for names in alike.values() for name in names}}


def timed(loads: Mapping[str, tuple[Callable[[], Classifier], int]]) -> dict[str, Row]:
    """Return what the models cost that functions return, each with the side of its images, pixels."""
    costs, calls, draw = dict[str, Row](), {}, np.random.default_rng(0)
    for name, (load, side) in loads.items():
        try:
            model = load().eval()
            graph = runtimes.exported(runtimes.reparameterized(model), side)
        except KdError as error:
            costs[name] = {"untimed": str(error)}
            continue
        costs[name] = {"mb": len(graph) / 1e6, "parameters": count_parameters(model)}
        calls[name] = partial(runtimes.onnx_runner(graph), draw.integers(0, 256, (1, 3, side, side), np.uint8))
    for name, took in cpu_ms(calls, SECONDS * len(calls)).items():
        costs[name]["ms"] = took
    return costs


def _student(tried: Trials, trial: Trial) -> Classifier:
    folder, recipe = RunDir(tried.folder / trial.name), resolve(trial.config)
    return best_student(folder, recipe.student, recipe.data.section, folder.manifest()["classes"])[0]


def _teacher(trial: Trial) -> Classifier:
    recipe = resolve(trial.config)
    section = recipe.teacher.section
    spread = section.shard or section.pipeline  # it may not fit into the memory of one process
    model = None if spread else load_fitted(recipe.teacher, open_sources(recipe.data))
    if not isinstance(model, Classifier):
        raise ModelError("teacher", "is no one network of torch in one process, so that it has no graph")
    return model


def _teacher_row(tried: Trials, best: Row, column: Column, cost: Row | None) -> Row:
    """Return score and costs of the teacher that all trials share; {} where there is none, or it has no such score."""
    score = tried.scores.of_teachers(tried.last_row(best["trial"])).get(TEACHER, {}).get(column.key)
    return {} if cost is None or score is None else {"trial": TEACHER, "score": score, **cost}


def _labels_only(tried: Trials, row: Row, column: Column) -> Row:
    alone = {} if row["why"] else tried.last_row(f"{row['trial']}/{BASELINE}")
    return {"labels_only": alone[column.key]} if column.key in alone else {}
