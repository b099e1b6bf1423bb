"""Write the results of a sweep: its trials, and what of the best score is luck."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kd.core.scores import Column
from kd.core.text import markdown_table
from kd.files.run_dir import RunDir
from kd.study.sifting import work_cells
from kd.study.sweeps import frontier
from kd.study.sweeps.trials import Trials


def trials_table(
    rows: Sequence[dict[str, Any]],
    trials: Trials,
    column: Column,
    teacher: dict[str, Any],
) -> str:
    """Return the table of trials; `teacher`: its row, if the students differ."""
    title = f"{column.title} (95 %)"
    costs = frontier.cost_cells([*rows, teacher] if teacher else rows, column)
    sifted = any(trials.trial(row).config.sifter.kind != "none" for row in rows)
    lines = []
    for row, cost_cells in zip(rows, costs, strict=False):
        values = dict(row["values"])
        for key in trials.space.ranges:
            values[key] = f"{float(values[key]):.4g}"
        line = {**frontier.value_texts(values), title: _with_interval(row, column)}
        if sifted:
            run = RunDir(trials.folder / row["trial"])
            images = int(run.manifest().get("images", 0))
            line |= work_cells(run.metrics("epoch"), run.metrics("train"), images)
        lines.append({**line, **cost_cells, "": _remarks(row, row is rows[0])})
    blank = dict.fromkeys(lines[0], "-")
    if teacher:
        score = column.text(teacher["score"])
        lines.append({**blank, title: score, **costs[-1], "": "the teacher"})
    for values, error in trials.failed():
        lines.append({**blank, **frontier.value_texts(values), "": f"failed: {error}"})
    return markdown_table(lines)


def _remarks(row: Mapping[str, Any], best: bool) -> str:
    remarks = ["best"] if best else []
    if row.get("frontier"):
        remarks.append("frontier")
    if "untimed" in row:
        remarks.append(row["untimed"])
    if "pruned" in row:
        remarks.append(f"pruned at evaluation {row['pruned']}")
    return ", ".join(remarks)


def _with_interval(row: Mapping[str, Any], column: Column) -> str:
    ends = " to ".join(
        column.text(end).removesuffix(" %") for end in row.get("interval", ())
    )
    return column.text(row["score"]) + (f" ({ends})" if ends else "")


def luck_text(
    rows: Sequence[dict[str, Any]],
    fresh: Sequence[dict[str, Any]],
    tested: Mapping[str, Any],
    column: Column,
) -> str:
    """Report the best trial's scores with other seeds, and on test images if known."""
    best = rows[0]["score"]
    scores = [row["score"] for row in fresh]
    difference = (best - statistics.mean(scores)) * (-1 if column.smaller else 1)
    points = f"{difference:+.4f} {column.unit}".rstrip()
    if column.unit == "%":
        points = f"{100 * difference:+.1f} points"
    text = (
        f"The best of {len(rows)} trials has {column.with_title(best)} on validation"
        f" images. Trained again with {len(fresh)} other seeds it has"
        f" {' and '.join(map(column.text, scores))}: the seed's part of the best score"
        f" is {points}."
    )
    if not tested:
        return (
            f"{text} The images' part is not known: all of these were scored on the"
            " images that chose the best. data.test_fraction=0.3 keeps some apart."
        )
    tests = [_with_interval(row["test"], column) for row in fresh if "test" in row]
    return (
        f"{text} On test images, which chose nothing, the best has"
        f" {_with_interval(tested, column)}, the others {' and '.join(tests)}."
    )
