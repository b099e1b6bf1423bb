"""The sections of a report: functions from runs to HTML, "" if the runs have no content for it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kd.core.scores import Column
from kd.core.text import VARIANTS_NOTE, clock, html_table, percent, variant_rows
from kd.engine.monitor.timeline import APART, SPANS
from kd.setup.provenance import chain_lines
from kd.study.paying import Arms
from kd.study.report.record import RunRecord, teachers_of
from kd.study.report.summary import clock_of, learning_text, verdict
from kd.study.report.svg import Series, bars, esc, evenly, legend, lines, number, stack

COLORS = ("--c1", "--c2", "--c3", "--c4", "--c5", "--c6")
SAMPLES, WINDOWS = 240, 80  # most drawn samples of a machine; bars in the chart of log windows


def color(number: int) -> str:
    """Return the colour of a run."""
    return COLORS[number % len(COLORS)]


def section(title: str, hint: str, *content: str) -> str:
    """Return a titled section; "" without content."""
    body = "".join(content)
    anchor = title.lower().replace(" ", "-")
    text = f'<p class="hint">{esc(hint)}</p>' if hint else ""
    return f'<section id="{anchor}"><h2>{esc(title)}</h2>{text}{body}</section>' if body else ""


def card(title: str, *content: str) -> str:
    """Return a card with an optional title; "" without content."""
    body, head = "".join(content), f"<h3>{esc(title)}</h3>" if title else ""
    return f'<div class="card">{head}{body}</div>' if body else ""


def findings(runs: Sequence[RunRecord]) -> str:
    """Show the findings of the rules."""
    if not any("findings" in run.manifest or run.findings or run.timeline for run in runs):
        return ""
    entries = []
    for run in runs:
        who = f"{run.name}: " if len(runs) > 1 else ""
        for one in run.findings:
            evidence, change = esc(one["evidence"]), esc(f"{one['key']}={one['value']}")
            entries.append(
                f'<div class="finding {esc(one["severity"])}"><b>{esc(who + one["rule"])}</b> · {evidence}. '
                f'<span class="lead">(threshold: {esc(one["threshold"])})</span>'
                f"<p>{esc(one['advice']).replace(change, f'<code>{change}</code>')}</p></div>"
            )
    nothing = "<b>Nothing found.</b> No rule saw a bottleneck in the recorded windows."
    if any(run.unfinished and not run.findings for run in runs):
        nothing = "<b>Not judged.</b> The rules look at a run when it ends."
    return section("Findings", "", *(entries or [f'<div class="finding none">{nothing}</div>']))


def curves(runs: Sequence[RunRecord]) -> str:
    """Draw the loss, the scores and the learning rate over the steps."""
    loss, rate = ([_line(run.name, color(i), run.train, key) for i, run in enumerate(runs)] for key in ("loss", "lr"))
    columns = dict.fromkeys(column for run in runs for column in run.scores.columns)
    cards = [_chart("Training loss", loss, "", runs), *(_score_chart(column, runs) for column in columns)]
    cards.append(_chart("Learning rate", rate, ""))
    return section("Learning", "", f'<div class="grid">{"".join(cards)}</div>' if any(cards) else "")


def _score_chart(column: Column, runs: Sequence[RunRecord]) -> str:
    """Draw a score of all runs that have it, and of at most two teachers."""
    runs_with_it = [run for run in runs if column in run.scores.columns]
    series = [_line(run.name, color(i), run.val, column.key) for i, run in enumerate(runs) if run in runs_with_it]
    last = max((x for one in series for x in one.x), default=0.0)
    teachers = teachers_of(runs_with_it, "validation").items()
    named = [(name, values[column.key]) for name, values in teachers if column.key in values]
    for name, value in named[:2] if last else ():
        series.append(Series(name, "--c4", [0, last], [value, value], dashed=True))
    return _chart(f"Validation {column.title}", series, column.unit, runs)


def _line(name: str, color: str, rows: Sequence[Mapping[str, Any]], key: str) -> Series:
    """Return the finite values of a key over the steps, from rows that have it."""
    finite = [row for row in rows if key in row and math.isfinite(row[key])]
    return Series(name, color, [float(row["step"]) for row in finite], [float(row[key]) for row in finite])


def _chart(
    title: str,
    series: Sequence[Series],
    unit: str,
    runs: Sequence[RunRecord] = (),
    x_name: str = "step",
    width: int = 350,
) -> str:
    """Draw lines, with a vertical one at the step from which each run has full-size images."""
    series = [one for one in series if one.x]
    if not series:
        return ""
    if all(len(one.x) < 3 or one.dashed for one in series):  # equal steps: the later evaluation counts
        return card(title, bars([(one.name, [(one.y[-1], one.color)]) for one in series], unit))
    values = [value for one in series for value in one.y]
    for i, run in enumerate(runs):
        if size := run.keys.get("data.progressive.size"):
            at = float(run.keys["data.progressive.until"]) * run.steps
            series.append(Series(f"{run.name}: {size} px", color(i), [at, at], [min(values), max(values)], dashed=True))
    names = legend([(one.name, one.color) for one in series]) if len(series) > 1 else ""
    return card(title, lines(series, (width, 220), x_name, unit), names)


def paying(runs: Sequence[RunRecord]) -> str:
    """Draw the scores of runs and of their baselines over the total cost; the best of labels alone stays level."""
    cards = []
    for run in runs:
        if (arms := Arms.of(run)) is None:
            continue
        column = run.selection_metric
        series = [
            Series("distilled", "--c1", [*arms.distilled], [*arms.distilled.values()]),
            Series("labels alone", "--soft", [*arms.alone], [*arms.alone.values()]),
            Series("labels alone, best", "--soft", [0, arms.end], [arms.best] * 2, dashed=True),
            *(
                Series(name, "--c4", [0, arms.end], [row[column.key]] * 2, dashed=True)
                for name, row in run.scores.of_teachers(run.best).items()
            ),
        ]
        chart = _chart(run.name, series, column.unit, x_name=f"seconds of {clock_of(run)}", width=1060)
        cards.append(f'{chart}<p class="hint">{esc(f"{verdict(run)} {learning_text(run)}")}</p>')
    hint = "Validation scores over all that was spent, the teacher's fit and stored outputs before the first point."
    return section("Does it pay", hint, *cards)


def time(runs: Sequence[RunRecord]) -> str:
    """Show the parts of a step's time, in total and per log window."""
    cards = []
    for run in runs:
        rows = run.timeline.get(0, ())
        recorded = {name for row in rows for name in row["ms"]}
        names = [*(name for name in SPANS if name in recorded), *sorted(recorded - set(SPANS))]
        if names:
            parts = {name: sum(float(row["ms"].get(name, 0.0)) for row in rows) for name in names}
            cards.append(card(run.name if len(runs) > 1 else "The whole run", _total(run, parts), _windows(run, parts)))
    hint = "Wall-clock time of rank 0, by what it was spent on. In the chart, each bar is one log window."
    return section("Where the time went", hint, *cards)


def _total(run: RunRecord, parts: Mapping[str, float]) -> str:
    total = sum(parts.values()) or 1.0
    bar, entries = "", []
    for name, ms in parts.items():
        share = 100 * ms / total
        if share < 0.05:
            continue
        tint = f"--{name}" if name in SPANS else "--other"
        bar += f'<i style="width:{share:.2f}%;background:var({tint})" title="{esc(name)} {share:.1f} %"></i>'
        entries.append((f"{name} {clock(ms / 1000)} ({share:.1f} %)", tint))
    hint = f'<p class="hint">{clock(total / 1000)} for {run.steps:,} steps, from the opened run folder to the end.</p>'
    return f'{hint}<div class="whole" data-total="{total:.3f}">{bar}</div>{legend(entries)}'


def _windows(run: RunRecord, parts: Mapping[str, float]) -> str:
    before = [row for row in run.timeline[0] if row["steps"] and row["kind"] != "steady"]
    rows = [row for row in run.timeline[0] if row["kind"] == "steady"]
    if not rows:
        return ""
    rows = [rows[i] for i in evenly(len(rows), WINDOWS)]
    steps, layers = [float(row["step"]) for row in rows], []
    for name in (name for name, ms in parts.items() if ms and name not in APART):
        values = [float(row["ms"].get(name, 0.0)) / row["steps"] for row in rows]
        layers.append(Series(name, f"--{name}" if name in SPANS else "--other", steps, values))
    slow = max((row["slowest"] for row in rows if row.get("slowest")), key=lambda one: one[1], default=None)
    names = {"first": "The first step took", "warm-up": "A step of the warm-up took"}
    hints = [f"{names[row['kind']]} {number(row['wall_ms'] / row['steps'], 'ms')}." for row in before]
    hints += [f"The slowest step after it was {slow[0]:.0f}, with {number(slow[1], 'ms')}."] if slow else []
    chart = stack(layers, 1060, 240, "last step of the window", "ms")
    return f'<h3 style="margin-top:22px">Milliseconds a step</h3>{chart}<p class="hint">{esc(" ".join(hints))}</p>'


def machine(runs: Sequence[RunRecord]) -> str:
    """Show the use of cores, memory and GPUs."""
    cards = []
    for run in runs:
        for name, rows in run.monitor.items():
            if len(rows) > 1:
                host = name.rpartition("_")[0]
                title = f"{run.name}, {host}" if len(runs) > 1 else host
                cards.append(_host(title, [rows[i] for i in evenly(len(rows), SAMPLES)]))
    return section("The machine", "Samples of the machine, one a second.", *cards)


def _host(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    times = [float(row["time"]) - float(rows[0]["time"]) for row in rows]
    cores = [[value / 100 for value in row["cpu"] or [0.0]] for row in rows]
    mean = [sum(loads) / len(loads) for loads in cores]
    load = {"busiest": [*map(max, cores)], "mean": mean, "idlest": [*map(min, cores)]}
    text = f"{title}: load of {len(cores[0])} cores, {percent(sum(mean) / len(mean))} in the mean"
    small = [
        _samples(text, times, load, "%"),
        _samples("Memory, MiB", times, _columns(rows, {"machine": "memory_mib", "this run": "process_mib"}), "MiB"),
        _samples("Disk and network, MiB/s", times, _columns(rows, MOVED), "MiB/s"),
        _samples("GPU load", times, _of_gpus(rows, "utilization", 100), "%"),
        _samples("GPU power, W", times, _of_gpus(rows, "power_w", 1), "W"),
    ]
    return f'<div class="grid two" style="margin:14px 0">{"".join(small)}</div>'


CLOCK = "seconds since the first sample"
MOVED = {"read": "disk_read_mib_s", "written": "disk_write_mib_s", "network": "network_mib_s"}


def _columns(rows: Sequence[Mapping[str, Any]], keys: Mapping[str, str]) -> dict[str, list[float]]:
    sampled = {name: key for name, key in keys.items() if any(key in row for row in rows)}
    return {name: [float(row.get(key) or 0.0) for row in rows] for name, key in sampled.items()}


def _of_gpus(rows: Sequence[Mapping[str, Any]], key: str, scale: float) -> dict[str, list[float]]:
    count = min(len(row.get("gpu") or ()) for row in rows)  # a resumed run may have other GPUs
    return {f"GPU {i}": [float(row["gpu"][i].get(key) or 0.0) / scale for row in rows] for i in range(count)}


def _samples(title: str, times: Sequence[float], values: Mapping[str, Sequence[float]], unit: str) -> str:
    """Draw sampled values over the time; empty if there are none."""
    series = [Series(name, color(i), times, column) for i, (name, column) in enumerate(values.items())]
    names = legend([(one.name, one.color) for one in series])
    return card(title, lines(series, (515, 200), CLOCK, unit, zero=True), names) if series else ""


def chain(runs: Sequence[RunRecord]) -> str:
    """Draw the provenance of `export/` from the teacher to the graphs, with the comparison at each arrow."""
    found = {run.name if len(runs) > 1 else "": "\n".join(chain_lines(run.exported)) for run in runs}
    cards = [card(name, f"<pre>{esc(text)}</pre>") for name, text in found.items() if text]
    return section("Where the export comes from", "", *cards)


def variants(runs: Sequence[RunRecord]) -> str:
    """Show the measurements of `kd-export --compare`."""
    found = {run.name if len(runs) > 1 else "": variant_rows(run.exported) for run in runs}
    cards = [card(name, html_table(rows, ["file"])) for name, rows in found.items() if rows]
    return section("Which file to ship", VARIANTS_NOTE, *cards)
