"""Show what a step computes: profiled operators, and the parts of steps.

All times are milliseconds per image: those of a step of rank 0, divided by the batch,
so that runs of other batches can be compared. Shares are of the whole step.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from kd.core.text import format_number
from kd.engine.monitor.evidence import Evidence
from kd.study.report.record import RunRecord
from kd.study.report.view import Bar, Card, Grid, Section, color, scaled_bars

TOP = 5  # operators of each run that are drawn
FUSED_ATTENTION = "fused attention"
FUSED = r"^_?fused_"
FAMILIES = {
    FUSED_ATTENTION: r"scaled_dot_product|flash_attention|efficient_attention",
    "attention": r"bmm$|^_softmax",  # in a ViT only attention has them
    "matrix products": r"(^|_)(add)?mm(_|$)|linear",
    "convolutions": r"conv",
    "optimizer": rf"{FUSED}|^_foreach_",
    "copies and casts": r"^(copy_|_to_copy|to|cat|clone)$",
}
"""Families of operators by their names, the first that matches."""
Cost = tuple[float, float, str]  # milliseconds per image, share of a step, form
PARTS = {
    "data": "waiting for data",
    "teacher": "teacher",
    "forward": "student",
    "backward": "student",
    "optimizer": "update",
    "communication": "update",
}
HINT = (
    "Milliseconds per image and shares of rank 0: operators of the profiled steps,"
    " parts of steady steps."
)


def profile_of(content: Any) -> dict[str, Any]:
    """Return the content of operators.json; raise one of `DAMAGE` for any other."""
    rows = [
        {"name": row["name"] + "", "dtype": row["dtype"] + "", "ms": float(row["ms"])}
        for row in content["operators"]
    ]
    steps = int(content["steps"])
    wall_ms = float(content["wall_ms"])
    if steps < 1 or not wall_ms > 0:
        raise ValueError(f"{steps} steps in {wall_ms:g} ms")
    return {"steps": steps, "wall_ms": wall_ms, "operators": rows}


def family_of(name: str) -> str:
    """Return the family of an operator."""
    short = _short_name(name)
    for family, pattern in FAMILIES.items():
        if re.search(pattern, short):
            return family
    return "other"


def _short_name(name: str) -> str:
    return name.rpartition("::")[2]


def form_of(family: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return how operators of a family compute: their main type, and if fused."""
    names = [_short_name(row["name"]) for row in rows]
    if family == "optimizer":
        fused = any(re.search(FUSED, name) for name in names)
        return "fused" if fused else "not fused"
    ms_of = defaultdict[str, float](float)
    for row in rows:
        ms_of[row["dtype"]] += row["ms"]
    form = max(ms_of, key=lambda dtype: ms_of[dtype])
    if family != "attention":
        return form
    fused = any(family_of(name) == FUSED_ATTENTION for name in names)
    return ", ".join(filter(None, [form, "fused" if fused else "unfused"]))


def operator_costs(run: RunRecord, by_family: bool) -> dict[str, Cost]:
    """Return the costs of a profile's operators by name or family, largest first."""
    if not run.profile:
        return {}
    groups: dict[str, list[Any]] = {}
    for row in run.profile["operators"]:
        name = _short_name(row["name"])
        if by_family:
            name = family_of(name)
            name = "attention" if name == FUSED_ATTENTION else name
        groups.setdefault(name, []).append(row)
    images = run.profile["steps"] * (run.count("data.batch_size") or 1)
    sums = {name: sum(row["ms"] for row in rows) for name, rows in groups.items()}
    return {
        name: (
            sums[name] / images,
            sums[name] / run.profile["wall_ms"],
            form_of(name, groups[name]),
        )
        for name in sorted(sums, key=lambda name: -sums[name])
    }


def part_costs(run: RunRecord) -> dict[str, Cost]:
    """Return the costs of a steady step's parts, from the timeline of the run."""
    step = Evidence(run.timeline, ()).step()
    ms_of = defaultdict[str, float](float)
    for name, ms in step.items():
        ms_of[PARTS.get(name, "other")] += ms
    step_ms = sum(step.values()) or 1.0
    images = run.count("data.batch_size") or 1
    return {name: (ms / images, ms / step_ms, "") for name, ms in ms_of.items()}


def how_to_profile(run: RunRecord) -> str:
    """Return how a run gets a profile; "" where it has one."""
    if run.profile:
        return ""
    last = max(2, min(30, run.steps - 1)) if run.steps else 30
    keys = f"profile.steps=[{max(1, last - 10)}, {last}]"
    return (
        f"{run.name} has no profile of its operators: run it again under another"
        f" run.name with {keys}."
    )


def operator_rows(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """Return a row for each family of operators, with a column for each profile."""
    profiles = {run.name: operator_costs(run, True) for run in runs if run.profile}
    if not profiles:
        return []
    names = dict.fromkeys(name for costs in profiles.values() for name in costs)
    names.pop("other", None)
    rows = []
    for name in [*names, "other"]:
        row = {"operators": name}
        for run, costs in profiles.items():
            row[run] = _cell(*costs[name]) if name in costs else "-"
        rows.append(row)
    return rows


def _cell(ms: float, share: float, form: str) -> str:
    text = f"{format_number(ms, 'ms')} ({100 * share:.0f} %)"
    return f"{text}, {form}" if form else text


def machine_rows(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """Return batch, speed and memory as rows, with a column for each run."""
    columns = {run.name: _machine_cells(run) for run in runs}
    return [
        {"run": title, **{name: cells[title] for name, cells in columns.items()}}
        for title in _machine_cells(runs[0])
    ]


def _machine_cells(run: RunRecord) -> dict[str, str]:
    last = run.train[-1] if run.train else {}
    peak = run.manifest.get("peak_mib")
    optimizer = last.get("optimizer_mib")
    return {
        "images per step": f"{run.count('data.batch_size'):,}",
        "images/s of steady steps": format_number(_steady_images_per_second(run)),
        "ranks": str(run.manifest.get("world_size", 1)),
        "peak memory of rank 0": "-" if peak is None else f"{peak:,} MiB",
        "optimizer per rank": "-"
        if optimizer is None
        else format_number(optimizer, "MiB"),
    }


def _steady_images_per_second(run: RunRecord) -> float:
    """Return the speed of steady steps; that of the whole run if none is steady.

    A steady step has no evaluation, checkpoint or profile.
    """
    ms = sum(Evidence(run.timeline, ()).step().values())
    return 1000 * run.count("data.batch_size") / ms if ms else run.images_per_second


def operator_sections(runs: Sequence[RunRecord]) -> list[Section]:
    """Show what a step computes; for several runs also the parts of their steps."""
    names = [run.name for run in runs]
    legend = [(name, color(i)) for i, name in enumerate(names)] if len(runs) > 1 else []
    profiles = [operator_costs(run, False) for run in runs]
    longest = dict.fromkeys(name for profile in profiles for name in [*profile][:TOP])
    cards = []
    if longest:
        title = f"The {TOP} operators with the most time"
        cards.append(Card(title, legend=legend, bars=_bars([*longest], profiles)))
    if len(runs) > 1:
        steps = [part_costs(run) for run in runs]
        order = [
            name
            for name in dict.fromkeys([*PARTS.values(), "other"])
            if any(name in step for step in steps)
        ]
        if order:
            bars = _bars(order, steps)
            cards.append(Card("Parts of a step", legend=legend, bars=bars))
    if rows := operator_rows(runs):
        cards.append(Card("What they compute, and how", table=rows, left_columns=names))
    if len(runs) > 1:
        cards.append(Card("Batch, speed, memory", table=machine_rows(runs)))
    notes = [text for run in runs if (text := how_to_profile(run))]
    return [Section("What a step computes", [Grid(cards, 2)], HINT, notes)]


def _bars(
    names: Sequence[str], runs: Sequence[dict[str, Cost]]
) -> dict[str, list[Bar]]:
    """Return a bar for each name and run that has costs."""
    rows: dict[str, list[tuple[float, str, str]]] = {}
    for name in names:
        rows[name] = []
        for i, costs in enumerate(runs):
            if costs:
                cost = costs.get(name, (0.0, 0.0, ""))
                rows[name].append((cost[0], color(i), _cell(*cost)))
    return scaled_bars(rows)
