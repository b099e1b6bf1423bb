"""Turn runs into the sections of a page, [] if they have no content for one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
from kd.study.report.charts import (
    Axis,
    Chart,
    Level,
    Series,
    evenly,
    heat,
    heat_legend,
    lines,
    stack,
)
from kd.study.report.record import RunRecord, teachers_of
from kd.study.report.summary import clock_of, learning_text, paying_verdict
from kd.study.report.view import (
    Card,
    Grid,
    Section,
    TimeShare,
    color,
    scaled_bars,
    section,
)

SAMPLES = 240  # most drawn samples of a machine
# most columns of a heat map: each has five pixels, three minutes of ten hours. With 192
# cores it takes 50 kB at most.
COLUMNS = 200
WINDOWS = 80  # most bars in the chart of log windows
SMALL = (300, 220)  # pixels of a chart of a third of the page's width
HALF = (515, 230)  # of half of the width
WIDE = (1050, 260)  # of all of it
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
    """Return the finite values of a key over the steps of each run."""
    series = []
    for i, run in enumerate(runs):
        rows = [
            row for row in getattr(run, kind) if key in row and math.isfinite(row[key])
        ]
        steps = [float(row["step"]) for row in rows]
        values = [float(row[key]) for row in rows]
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
    if all(len(line.x) < 3 for line in series):
        # of equal steps the later evaluation counts
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
        return [Card(title, bars=scaled_bars(rows))]
    return [
        Card(title, chart=lines(series, SMALL, Axis("step"), Axis(unit=unit), levels))
    ]


def paying(runs: Sequence[RunRecord]) -> list[Section]:
    """Draw the scores of runs and of their baselines over the total cost.

    The best of labels alone is drawn as a level.
    """
    cards = []
    for run in runs:
        arms = Arms.of(run)
        if arms is None:
            continue
        column = run.selection_metric
        series = [
            Series(name, tint, [*curve], [*curve.values()])
            for name, tint, curve in (
                ("distilled", "var(--c1)", arms.distilled),
                ("labels alone", "var(--soft)", arms.alone),
            )
        ]
        teachers = run.scores.of_teachers(run.best).items()
        levels = [
            Level("labels alone, best", "var(--soft)", y=arms.best),
            *(Level(name, "var(--c4)", y=row[column.key]) for name, row in teachers),
        ]
        cost = Axis(f"seconds of {clock_of(run)}", zero=True)
        chart = lines(series, WIDE, cost, Axis(unit=column.unit), levels)
        cards.append(
            Card(
                run.name,
                chart=chart,
                notes=[f"{paying_verdict(run)} {learning_text(run)}"],
            )
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
            span_ms = {
                name: sum(float(row["ms"].get(name, 0.0)) for row in rows)
                for name in names
            }
            title = run.name if len(runs) > 1 else "The whole run"
            cards += [_total(run, span_ms, title), *_windows(run, span_ms)]
    hint = (
        "Wall-clock time of rank 0, by what it was spent on. In the chart, each bar is"
        " one log window."
    )
    return section("Where the time went", cards, hint)


def _total(run: RunRecord, span_ms: Mapping[str, float], title: str) -> Card:
    total = sum(span_ms.values()) or 1.0
    shares = []
    legend = []
    for name, ms in span_ms.items():
        share = TimeShare(name, 100 * ms / total, _span_color(name))
        if share.percent >= LEAST_SHARE:
            shares.append(share)
            text = f"{name} {format_seconds(ms / 1000)} ({share.percent:.1f} %)"
            legend.append((text, share.color))
    seconds = format_seconds(total / 1000)
    hint = f"{seconds} for {run.steps:,} steps, from the opened run folder to the end."
    return Card(title, [hint], shares, total, legend=legend)


def _span_color(name: str) -> str:
    return f"var(--{name})" if name in SPANS else "var(--other)"


def _windows(run: RunRecord, span_ms: Mapping[str, float]) -> list[Card]:
    """Draw the time of a step in each log window, by what it was spent on."""
    rows = [row for row in run.timeline[0] if row["kind"] == "steady"]
    if not rows:
        return []
    rows = [rows[i] for i in evenly(len(rows), WINDOWS)]
    steps = [float(row["step"]) for row in rows]
    layers = []
    for name, ms in span_ms.items():
        if ms and name not in APART:
            values = [float(row["ms"].get(name, 0.0)) / row["steps"] for row in rows]
            layers.append(Series(name, _span_color(name), steps, values))
    names = {"first": "The first step took", "warm-up": "A step of the warm-up took"}
    notes = [
        f"{names[row['kind']]} {format_number(row['wall_ms'] / row['steps'], 'ms')}."
        for row in run.timeline[0]
        if row["steps"] and row["kind"] != "steady"
    ]
    slowest = [row["slowest"] for row in rows if row.get("slowest")]
    if slowest:
        step, ms, *_ = max(slowest, key=lambda entry: entry[1])
        notes.append(
            f"The slowest step after it was {step:.0f}, with {format_number(ms, 'ms')}."
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
                grids += _host(title, rows)
    if not grids:
        return []
    return [Section("The machine", grids, "Samples of the machine, one a second.")]


def _host(title: str, rows: Sequence[Mapping[str, Any]]) -> list[Grid]:
    """Draw the load of a machine from its samples."""
    times_T = np.array([float(row["time"]) for row in rows]) - float(rows[0]["time"])
    cores = [row["cpu"] for row in rows]
    gpus = [
        [gpu.get("utilization", math.nan) for gpu in row.get("gpu") or ()]
        for row in rows
    ]
    heats = [
        *_heat(f"{title}: load of each core", "core", times_T, cores),
        *_heat(f"{title}: load of each GPU", "GPU", times_T, gpus),
    ]
    picks = evenly(len(rows), SAMPLES)
    samples = [rows[i] for i in picks]
    times = times_T[picks].tolist()
    memory = {"machine": "memory_mib", "this run": "process_mib"}
    cards = {
        "Memory, MiB": (_columns(samples, memory), "MiB"),
        "Disk and network, MiB/s": (_columns(samples, MOVED), "MiB/s"),
        "GPU power, W": (_of_gpus(samples, "power_w"), "W"),
    }
    lines_cards = [
        Card(card_title, chart=_samples(times, values, unit))
        for card_title, (values, unit) in cards.items()
        if values
    ]
    return [grid for grid in (Grid(heats), Grid(lines_cards, 2)) if grid.cards]


def _heat(
    title: str, name: str, times_T: np.ndarray, percents: Sequence[Sequence[float]]
) -> list[Card]:
    """Draw sampled loads, percent, by device and time; [] without devices."""
    # a resumed run may have other devices
    devices = min(map(len, percents))
    loads_TR = np.array([row[:devices] for row in percents], float) / 100
    known_T = ~np.isnan(loads_TR).any(1)
    times_T = times_T[known_T]
    loads_TR = loads_TR[known_T]
    if not loads_TR.size:
        return []
    end = max(times_T[-1], 1e-9)
    # with two samples in each column, no late sample leaves an empty one
    count = max(1, min(COLUMNS, len(times_T) // 2))
    columns_T = np.clip((times_T / end * count).astype(int), 0, count - 1)
    shares_RC = np.full((devices, count), np.nan)
    for column in np.unique(columns_T):
        shares_RC[:, column] = loads_TR[columns_T == column].mean(0)
    chart = heat(shares_RC, name, WIDE[0], Axis(CLOCK, end=end))
    mean = percent(float(loads_TR.mean()))
    return [Card(f"{title}, {mean} in the mean", chart=chart, legend=heat_legend())]


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


def _of_gpus(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[float]]:
    # a resumed run may have other GPUs
    count = min(len(row.get("gpu") or ()) for row in rows)
    return {
        f"GPU {i}": [float(row["gpu"][i].get(key) or 0.0) for row in rows]
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
    """Show how `export/` was made from the teacher, with each comparison."""
    cards = []
    for run in runs:
        if text := "\n".join(chain_lines(run.exported)):
            cards.append(Card(run.name if len(runs) > 1 else "", text=text))
    return section("Where the export comes from", cards)


def variants(runs: Sequence[RunRecord]) -> list[Section]:
    """Show the measurements of `kd-export --compare`."""
    cards = []
    for run in runs:
        if rows := variant_rows(run.exported):
            title = run.name if len(runs) > 1 else ""
            cards.append(Card(title, table=rows, left_columns=["file"]))
    return section("Which file to ship", cards, VARIANTS_NOTE)
