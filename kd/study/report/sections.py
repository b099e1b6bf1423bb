"""The sections of a report: functions from runs to what the page shows, [] if the runs
have no content for it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kd.core.scores import Column
from kd.core.text import (
    VARIANTS_NOTE,
    format_number,
    format_seconds,
    percent,
    variant_rows,
)
from kd.engine.monitor.timeline import APART, SPANS
from kd.setup.provenance import chain_lines
from kd.study.paying import Arms
from kd.study.report.charts import Axis, Chart, Level, Series, evenly, lines, stack
from kd.study.report.record import RunRecord, teachers_of
from kd.study.report.summary import clock_of, learning_text, verdict
from kd.study.report.view import Card, Grid, Section, TimeShare, bars, color, section

SAMPLES, WINDOWS = (
    240,
    80,
)  # most drawn samples of a machine; bars in the chart of log windows
SMALL, HALF, WIDE = (
    (300, 220),
    (515, 230),
    (1050, 260),
)  # sizes of charts, pixels: a third of the page, a half, all
LEAST_SHARE = 0.05  # percent of the time below which a part is not drawn


def curves(runs: Sequence[RunRecord]) -> list[Section]:
    """Draw the loss, the scores and the learning rate over the steps."""
    columns = dict.fromkeys(column for run in runs for column in run.scores.columns)
    cards = [
        *_curve(
            "Training loss", _over_steps(runs, "train", "loss"), "", _size_changes(runs)
        ),
        *(card for column in columns for card in _score_chart(column, runs)),
        *_curve("Learning rate", _over_steps(runs, "train", "lr"), ""),
    ]
    return [Section("Learning", [Grid(cards, 3)])] if cards else []


def _score_chart(column: Column, runs: Sequence[RunRecord]) -> list[Card]:
    """Draw a score of all runs that have it, and of at most two teachers."""
    scored = [run for run in runs if column in run.scores.columns]
    series = [
        line
        for run, line in zip(runs, _over_steps(runs, "val", column.key), strict=True)
        if run in scored
    ]
    teachers = teachers_of(scored, "validation").items()
    values = [(name, row[column.key]) for name, row in teachers if column.key in row]
    levels = [Level(name, "var(--c4)", y=value) for name, value in values[:2]]
    return _curve(
        f"Validation {column.title}",
        series,
        column.unit,
        [*levels, *_size_changes(runs)],
    )


def _over_steps(runs: Sequence[RunRecord], kind: str, key: str) -> list[Series]:
    """Return the finite values of a key over the steps of each run, from rows that have
    it.
    """
    series = []
    for i, run in enumerate(runs):
        rows = [
            row for row in getattr(run, kind) if key in row and math.isfinite(row[key])
        ]
        steps, values = (
            [float(row["step"]) for row in rows],
            [float(row[key]) for row in rows],
        )
        series.append(Series(run.name, color(i), steps, values))
    return series


def _size_changes(runs: Sequence[RunRecord]) -> list[Level]:
    """Return upright lines at the steps from which runs have full-size images."""
    levels = []
    for i, run in enumerate(runs):
        if size := run.keys.get("data.progressive.size"):
            step = float(run.keys["data.progressive.until"]) * run.steps
            levels.append(Level(f"{run.name}: {size} px", color(i), x=step))
    return levels


def _curve(
    title: str, series: Sequence[Series], unit: str, levels: Sequence[Level] = ()
) -> list[Card]:
    """Draw lines over the steps; a few points are bars."""
    series = [line for line in series if line.x]
    if not series:
        return []
    if all(
        len(line.x) < 3 for line in series
    ):  # equal steps: the later evaluation counts
        last = {line.name: (line.y[-1], line.color) for line in series}
        last |= {
            level.name: (level.y, level.color)
            for level in levels
            if level.y is not None
        }
        rows = {
            name: [(value, tint, format_number(value, unit))]
            for name, (value, tint) in last.items()
        }
        return [Card(title, bars=bars(rows))]
    return [
        Card(title, chart=lines(series, SMALL, Axis("step"), Axis(unit=unit), levels))
    ]


def paying(runs: Sequence[RunRecord]) -> list[Section]:
    """Draw the scores of runs and of their baselines over the total cost; the best of
    labels alone stays level.
    """
    cards = []
    for run in runs:
        if (arms := Arms.of(run)) is None:
            continue
        column = run.selection_metric
        series = [
            Series(
                "distilled", "var(--c1)", [*arms.distilled], [*arms.distilled.values()]
            ),
            Series(
                "labels alone", "var(--soft)", [*arms.alone], [*arms.alone.values()]
            ),
        ]
        teachers = run.scores.of_teachers(run.best).items()
        levels = [
            Level("labels alone, best", "var(--soft)", y=arms.best),
            *(Level(name, "var(--c4)", y=row[column.key]) for name, row in teachers),
        ]
        cost = Axis(f"seconds of {clock_of(run)}", zero=True)
        chart = lines(series, WIDE, cost, Axis(unit=column.unit), levels)
        cards.append(
            Card(run.name, chart=chart, notes=[f"{verdict(run)} {learning_text(run)}"])
        )
    hint = (
        "Validation scores over all that was spent, the teacher's fit and stored"
        " outputs before the first point."
    )
    return section("Does it pay", cards, hint)


def time(runs: Sequence[RunRecord]) -> list[Section]:
    """Show the parts of a step's time, in total and per log window."""
    cards = []
    for run in runs:
        rows = run.timeline.get(0, ())
        recorded = {name for row in rows for name in row["ms"]}
        names = [
            *(name for name in SPANS if name in recorded),
            *sorted(recorded - set(SPANS)),
        ]
        if names:
            parts = {
                name: sum(float(row["ms"].get(name, 0.0)) for row in rows)
                for name in names
            }
            cards.append(
                _total(run, parts, run.name if len(runs) > 1 else "The whole run")
            )
            cards += _windows(run, parts)
    hint = (
        "Wall-clock time of rank 0, by what it was spent on. In the chart, each bar is"
        " one log window."
    )
    return section("Where the time went", cards, hint)


def _total(run: RunRecord, parts: Mapping[str, float], title: str) -> Card:
    total = sum(parts.values()) or 1.0
    shares = [
        TimeShare(name, 100 * ms / total, _span_color(name))
        for name, ms in parts.items()
    ]
    shares = [share for share in shares if share.percent >= LEAST_SHARE]
    legend = [
        (
            f"{share.name} {format_seconds(parts[share.name] / 1000)} ({share.percent:.1f} %)",
            share.color,
        )
        for share in shares
    ]
    hint = (
        f"{format_seconds(total / 1000)} for {run.steps:,} steps, from the opened run folder to"
        " the end."
    )
    return Card(title, [hint], shares, total, legend=legend)


def _span_color(name: str) -> str:
    return f"var(--{name})" if name in SPANS else "var(--other)"


def _windows(run: RunRecord, parts: Mapping[str, float]) -> list[Card]:
    before = [
        row for row in run.timeline[0] if row["steps"] and row["kind"] != "steady"
    ]
    rows = [row for row in run.timeline[0] if row["kind"] == "steady"]
    if not rows:
        return []
    rows = [rows[i] for i in evenly(len(rows), WINDOWS)]
    steps, layers = [float(row["step"]) for row in rows], []
    for name in (name for name, ms in parts.items() if ms and name not in APART):
        values = [float(row["ms"].get(name, 0.0)) / row["steps"] for row in rows]
        layers.append(Series(name, _span_color(name), steps, values))
    slow = max(
        (row["slowest"] for row in rows if row.get("slowest")),
        key=lambda entry: entry[1],
        default=None,
    )
    names = {"first": "The first step took", "warm-up": "A step of the warm-up took"}
    notes = [
        f"{names[row['kind']]} {format_number(row['wall_ms'] / row['steps'], 'ms')}."
        for row in before
    ]
    notes += (
        [
            f"The slowest step after it was {slow[0]:.0f}, with {format_number(slow[1], 'ms')}."
        ]
        if slow
        else []
    )
    chart = stack(
        layers, WIDE, Axis("last step of the window"), Axis(unit="ms", zero=True)
    )
    return [Card("Milliseconds a step", chart=chart, notes=[" ".join(notes)])]


def machine(runs: Sequence[RunRecord]) -> list[Section]:
    """Show the use of cores, memory and GPUs."""
    grids = []
    for run in runs:
        for name, rows in run.monitor.items():
            if len(rows) > 1:
                host = name.rpartition("_")[0]
                title = f"{run.name}, {host}" if len(runs) > 1 else host
                grids.append(
                    Grid(_host(title, [rows[i] for i in evenly(len(rows), SAMPLES)]), 2)
                )
    return (
        [Section("The machine", grids, "Samples of the machine, one a second.")]
        if grids
        else []
    )


def _host(title: str, rows: Sequence[Mapping[str, Any]]) -> list[Card]:
    times = [float(row["time"]) - float(rows[0]["time"]) for row in rows]
    cores = [[value / 100 for value in row["cpu"] or [0.0]] for row in rows]
    mean = [sum(loads) / len(loads) for loads in cores]
    load = {"busiest": [*map(max, cores)], "mean": mean, "idlest": [*map(min, cores)]}
    text = (
        f"{title}: load of {len(cores[0])} cores, {percent(sum(mean) / len(mean))} in"
        " the mean"
    )
    memory = _columns(rows, {"machine": "memory_mib", "this run": "process_mib"})
    cards = {
        text: (load, "%"),
        "Memory, MiB": (memory, "MiB"),
        "Disk and network, MiB/s": (_columns(rows, MOVED), "MiB/s"),
        "GPU load": (_of_gpus(rows, "utilization", 100), "%"),
        "GPU power, W": (_of_gpus(rows, "power_w", 1), "W"),
    }
    return [
        Card(title, chart=_samples(times, values, unit))
        for title, (values, unit) in cards.items()
        if values
    ]


CLOCK = "seconds since the first sample"
MOVED = {
    "read": "disk_read_mib_s",
    "written": "disk_write_mib_s",
    "network": "network_mib_s",
}


def _columns(
    rows: Sequence[Mapping[str, Any]], keys: Mapping[str, str]
) -> dict[str, list[float]]:
    sampled = {
        name: key for name, key in keys.items() if any(key in row for row in rows)
    }
    return {
        name: [float(row.get(key) or 0.0) for row in rows]
        for name, key in sampled.items()
    }


def _of_gpus(
    rows: Sequence[Mapping[str, Any]], key: str, scale: float
) -> dict[str, list[float]]:
    count = min(
        len(row.get("gpu") or ()) for row in rows
    )  # a resumed run may have other GPUs
    return {
        f"GPU {i}": [float(row["gpu"][i].get(key) or 0.0) / scale for row in rows]
        for i in range(count)
    }


def _samples(
    times: Sequence[float], values: Mapping[str, Sequence[float]], unit: str
) -> Chart:
    """Draw sampled values over the time."""
    series = [
        Series(name, color(i), times, column)
        for i, (name, column) in enumerate(values.items())
    ]
    return lines(series, HALF, Axis(CLOCK), Axis(unit=unit, zero=True))


def chain(runs: Sequence[RunRecord]) -> list[Section]:
    """Show the provenance of `export/` from the teacher to the graphs, with the
    comparison at each arrow.
    """
    texts = {
        _name_among(runs, run): "\n".join(chain_lines(run.exported)) for run in runs
    }
    return section(
        "Where the export comes from",
        [Card(name, text=text) for name, text in texts.items() if text],
    )


def variants(runs: Sequence[RunRecord]) -> list[Section]:
    """Show the measurements of `kd-export --compare`."""
    tables = {_name_among(runs, run): variant_rows(run.exported) for run in runs}
    cards = [
        Card(name, table=rows, left=["file"]) for name, rows in tables.items() if rows
    ]
    return section("Which file to ship", cards, VARIANTS_NOTE)


def _name_among(runs: Sequence[RunRecord], run: RunRecord) -> str:
    """Return the name of a run where there are several."""
    return run.name if len(runs) > 1 else ""
