"""A report for terminals and pull requests: Markdown with sparklines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kd.progress.console import NAMES
from kd.report.record import RunRecord, differences, points, price_rows, time_parts
from kd.text import clock, percent, table

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return values as a row of blocks, lowest to highest, at most `width` of them; more are averaged."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BLOCKS[min(7, int(8 * (value - low) / span))] for value in means)


def summary(runs: Sequence[RunRecord]) -> str:
    """Return runs as Markdown: curves, time, findings, costs, what differs."""
    lines = [f"# {', '.join(run.name for run in runs)}", ""]
    for run in runs:
        lines += ["", f"## {run.name}", ""] if len(runs) > 1 else []
        lines += [*_results(run), curves(run), *where_time_went(run), *_findings(run)]
    if any(run.cost for run in runs):
        lines += ["Costs:", "", table(price_rows(runs)), ""]
    if len(runs) > 1:
        rows = [
            {"key": key, **{run.name: str(value) for run, value in zip(runs, values, strict=True)}}
            for key, values in differences(runs)
        ]
        lines += ["What differs in the configuration:", "", table(rows), ""] if rows else ["One configuration.", ""]
    return "\n".join(lines)


def _results(run: RunRecord) -> list[str]:
    best = run.best
    if not best:
        return ["Not evaluated yet.", ""]
    parts, teacher = [f"{NAMES.get(run.decides, run.decides)} {percent(best[run.decides])}"], f"teacher_{run.decides}"
    parts += [f"teacher {percent(best[teacher])}"] if teacher in best else []
    parts += [f"agreement {percent(best['agreement'])}"] if "agreement" in best and run.decides != "agreement" else []
    if run.baseline is not None and run.baseline.best:
        parts.append(f"labels only {percent(run.baseline.best[run.baseline.decides])}")
    parts += [f"{run.images_per_second:.0f} images/s", f"{clock(run.seconds)} of training"]
    return [", ".join(parts) + ".", ""]


def curves(run: RunRecord) -> str:
    """Return the curves as sparklines, with their first and last values; empty before the second row."""
    lines = []
    for name, rows, key, unit in (
        ("loss", run.train, "loss", ""),
        ("accuracy", run.val, "accuracy", "%"),
        ("mAP", run.val, "map", "%"),
        ("F1", run.val, "f1_macro", "%"),
        ("knn", run.val, "knn", "%"),
        ("agreement", run.val, "agreement", "%"),
        ("step, ms", run.train, "step_ms", ""),
        ("images/s", run.train, "images_per_second", ""),
    ):
        values = points(rows, key)[1]
        if len(values) > 1:
            first, last = (percent(v) if unit else f"{v:.4g}" for v in (values[0], values[-1]))
            lines.append(f"{name:10s} {sparkline(values)} {first} -> {last}")
    return "\n".join(["```", *lines, "```", ""]) if lines else ""


def where_time_went(run: RunRecord) -> list[str]:
    """Return the table of a run's wall-clock time by what the loop did, largest first."""
    parts = time_parts(run)
    total = sum(parts.values())
    if not total:
        return []
    rows = [
        {"where the time went": name, "time": clock(ms / 1000), "share": percent(ms / total)}
        for name, ms in sorted(parts.items(), key=lambda pair: -pair[1])
        if ms / total >= 0.0005
    ]
    return [table(rows), ""]


def _findings(run: RunRecord) -> list[str]:
    lines = []
    for one in run.findings:
        change = f"{one['key']}={one['value']}"
        advice = one["advice"].replace(change, f"`{change}`")
        lines.append(f"- **{one['rule']}** ({one['severity']}): {one['evidence']}. {advice}")
    return [*lines, ""] if lines else []
