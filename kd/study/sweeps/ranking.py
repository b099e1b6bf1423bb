"""The results of a sweep as text: the table of its trials, and what part of the best
score is luck.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kd.core.scores import Column
from kd.core.text import markdown_table
from kd.files.run_dir import RunDir
from kd.study.sifting import work
from kd.study.sweeps import frontier
from kd.study.sweeps.trials import Trials


def table_of(
    rows: Sequence[dict[str, Any]],
    tried: Trials,
    column: Column,
    reference: dict[str, Any],
) -> str:
    """Return the table of trials; `reference`: the teacher's row, if the students
    differ.
    """
    title, lines = f"{column.title} (95 %)", []
    more = frontier.cells([*rows, reference] if reference else rows, column)
    sifted = any(tried.trial(row).config.sifter.kind != "none" for row in rows)
    for row, cells in zip(rows, more, strict=False):
        marks = [
            "best" * (row is rows[0]),
            "frontier" * row.get("frontier", False),
            row.get("untimed", ""),
        ]
        marks.append(f"pruned at evaluation {row['pruned']}" if "pruned" in row else "")
        spent = _work(tried, row["trial"]) if sifted else {}
        measured = {**spent, **cells, "": ", ".join(filter(None, marks))}
        values = {key: f"{float(row['values'][key]):.4g}" for key in tried.space.ranges}
        lines.append(
            {
                **frontier.named(row["values"] | values),
                title: _with_interval(row, column),
                **measured,
            }
        )
    blank = dict.fromkeys(lines[0], "-")
    if reference:
        lines.append(
            {
                **blank,
                title: column.text(reference["score"]),
                **more[-1],
                "": "the teacher",
            }
        )
    for values, error in tried.failed():
        lines.append({**blank, **frontier.named(values), "": f"failed: {error}"})
    return markdown_table(lines)


def _work(tried: Trials, name: str) -> dict[str, str]:
    run = RunDir(tried.folder / name)
    rows = run.rows()
    epochs, train = (
        [row for row in rows if row["kind"] == kind] for kind in ("epoch", "train")
    )
    return work(epochs, train, int(run.manifest().get("images", 0)))


def _with_interval(row: Mapping[str, Any], column: Column) -> str:
    ends = " to ".join(
        column.text(end).removesuffix(" %") for end in row.get("interval", ())
    )
    return column.text(row["score"]) + (f" ({ends})" if ends else "")


def luck(
    rows: Sequence[dict[str, Any]],
    fresh: Sequence[dict[str, Any]],
    tested: Mapping[str, Any],
    column: Column,
) -> str:
    """Report the best trial's scores with other seeds and on test images, or that these
    are unknown.
    """
    best, count, again = rows[0]["score"], len(rows), [row["score"] for row in fresh]
    difference = (best - statistics.mean(again)) * (-1 if column.smaller else 1)
    points = (
        f"{100 * difference:+.1f} points"
        if column.unit == "%"
        else f"{difference:+.4f} {column.unit}".rstrip()
    )
    text = (
        f"The best of {count} trials has {column.with_title(best)} on validation"
        " images. Trained again with "
    )
    text += (
        f"{len(fresh)} other seeds it has"
        f" {' and '.join(column.text(score) for score in again)}: "
    )
    text += f"the seed's part of the best score is {points}. "
    if not tested:
        return (
            text
            + "The images' part is not known: all of these were scored on the images"
            " that chose the best. data.test_fraction=0.3 keeps some apart."
        )
    others = " and ".join(
        _with_interval(row["test"], column) for row in fresh if "test" in row
    )
    return (
        text + "On test images, which chose nothing, the best has"
        f" {_with_interval(tested, column)}, the others {others}."
    )
