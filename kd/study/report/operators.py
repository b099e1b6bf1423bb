"""What a step computes: the profiled operators of one run or several, and the parts of
their steps.

All times are milliseconds per image: those of a step of rank 0, divided by the batch,
so that runs of other batches can be compared. Shares are of the whole step.
"""

import re
from collections.abc import Sequence
from typing import Any

from kd.core.text import format_number
from kd.engine.monitor.evidence import Evidence
from kd.study.report.record import RunRecord
from kd.study.report.view import Bar, Card, Grid, Section, bars, color

TOP = 5  # operators of each run that are drawn
FUSED_ATTENTION, FUSED, FOREACH = "fused attention", r"^_?fused_", r"^_foreach_"
FAMILIES = {
    FUSED_ATTENTION: r"scaled_dot_product|flash_attention|efficient_attention",
    "attention": r"bmm$|^_softmax",  # in a ViT only attention has them
    "matrix products": r"(^|_)(add)?mm(_|$)|linear",
    "convolutions": r"conv",
    "optimizer": rf"{FUSED}|{FOREACH}",
    "copies and casts": r"^(copy_|_to_copy|to|cat|clone)$",
}
"""Families of operators by their names, the first that matches."""
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
    """Return the content of operators.json; raises one of `DAMAGE` if it is not what a
    profiled run writes.
    """
    operators = content["operators"]
    rows = [
        {"name": row["name"] + "", "dtype": row["dtype"] + "", "ms": float(row["ms"])}
        for row in operators
    ]
    steps, wall_ms = int(content["steps"]), float(content["wall_ms"])
    if steps < 1 or not wall_ms > 0:
        raise ValueError(f"{steps} steps in {wall_ms:g} ms")
    return {"steps": steps, "wall_ms": wall_ms, "operators": rows}


def family_of(name: str) -> str:
    """Return the family of an operator."""
    short = name.rpartition("::")[2]
    return next(
        (family for family, pattern in FAMILIES.items() if re.search(pattern, short)),
        "other",
    )


def form_of(family: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return how operators of a family compute: the type with the most time, and
    whether they are fused.
    """
    names, spent = [row["name"].rpartition("::")[2] for row in rows], dict[str, float]()
    for row in rows:
        spent[row["dtype"]] = spent.get(row["dtype"], 0.0) + row["ms"]
    words = (
        [max(spent, key=lambda dtype: spent[dtype])] if family != "optimizer" else []
    )
    if family == "attention":
        words.append(
            "fused"
            if any(family_of(name) == FUSED_ATTENTION for name in names)
            else "unfused"
        )
    if family == "optimizer":
        words.append(
            "fused" if any(re.search(FUSED, name) for name in names) else "not fused"
        )
    return ", ".join(filter(None, words))


def grouped(run: RunRecord, by_family: bool) -> dict[str, tuple[float, float, str]]:
    """Return the operators of a profile by name or family: milliseconds per image,
    share of a step, form.
    """
    if not run.profile:
        return {}
    per_image, groups = (
        run.profile["steps"] * int(run.keys.get("data.batch_size", 0) or 1),
        dict[str, list[Any]](),
    )
    for row in run.profile["operators"]:
        family = family_of(row["name"])
        family = "attention" if family == FUSED_ATTENTION else family
        groups.setdefault(
            family if by_family else row["name"].rpartition("::")[2], []
        ).append(row)
    sums = {name: sum(row["ms"] for row in rows) for name, rows in groups.items()}
    return {
        name: (
            sums[name] / per_image,
            sums[name] / run.profile["wall_ms"],
            form_of(name, groups[name]),
        )
        for name in sorted(sums, key=lambda name: -sums[name])
    }


def parts_of(run: RunRecord) -> dict[str, tuple[float, float, str]]:
    """Return the parts of a steady step likewise, from the timeline that each
    run has.
    """
    step, found = Evidence(run.timeline, ()).step(), dict[str, float]()
    for name, ms in step.items():
        part = PARTS.get(name, "other")
        found[part] = found.get(part, 0.0) + ms
    whole, batch = (
        sum(step.values()) or 1.0,
        int(run.keys.get("data.batch_size", 0) or 1),
    )
    return {name: (ms / batch, ms / whole, "") for name, ms in found.items()}


def how_to_profile(run: RunRecord) -> str:
    """Say how a run gets a profile; "" where it has one."""
    if run.profile:
        return ""
    last = max(2, min(30, run.steps - 1)) if run.steps else 30
    keys = f"profile.steps=[{max(1, last - 10)}, {last}]"
    return (
        f"{run.name} has no profile of its operators: run it again under another"
        f" run.name with {keys}."
    )


def table_of(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """Return the families of operators as rows, with a column for each run that has a
    profile.
    """
    found = {run.name: grouped(run, True) for run in runs if run.profile}
    names = [
        *dict.fromkeys(
            name for families in found.values() for name in families if name != "other"
        ),
        "other",
    ]
    return [
        {"operators": name}
        | {run: _cell(*own[name]) if name in own else "-" for run, own in found.items()}
        for name in (names if found else ())
    ]


def _cell(ms: float, share: float, form: str) -> str:
    return f"{format_number(ms, 'ms')} ({100 * share:.0f} %)" + (
        f", {form}" if form else ""
    )


def machine_rows(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """Return batch, speed and memory as rows, with a column for each run."""
    rows = {
        "images per step": lambda run: (
            f"{int(run.keys.get('data.batch_size', 0) or 0):,}"
        ),
        "images/s of steady steps": lambda run: format_number(_steady(run)),
        "ranks": lambda run: str(run.manifest.get("world_size", 1)),
        "peak memory of rank 0": lambda run: (
            f"{run.manifest['peak_mib']:,} MiB" if "peak_mib" in run.manifest else "-"
        ),
        "optimizer per rank": lambda run: (
            format_number(run.train[-1]["optimizer_mib"], "MiB")
            if run.train and "optimizer_mib" in run.train[-1]
            else "-"
        ),
    }
    return [
        {"run": name, **{run.name: of(run) for run in runs}}
        for name, of in rows.items()
    ]


def _steady(run: RunRecord) -> float:
    """Return images/s without evaluations, checkpoints and profiles; of the whole run
    if no step is steady.
    """
    ms = sum(Evidence(run.timeline, ()).step().values())
    return (
        1000 * int(run.keys.get("data.batch_size", 0) or 0) / ms
        if ms
        else run.images_per_second
    )


def operators(runs: Sequence[RunRecord]) -> list[Section]:
    """Show what a step computes; of several runs beside each other, with the parts of
    their steps.
    """
    names = [run.name for run in runs]
    legend = [(name, color(i)) for i, name in enumerate(names)] if len(runs) > 1 else []
    profiles = [grouped(run, False) for run in runs]
    longest = dict.fromkeys(name for profile in profiles for name in [*profile][:TOP])
    cards = []
    if longest:
        title = f"The {TOP} operators with the most time"
        cards.append(Card(title, legend=legend, bars=_bars([*longest], profiles)))
    if len(runs) > 1:
        parts = [parts_of(run) for run in runs]
        order = [
            name
            for name in dict.fromkeys([*PARTS.values(), "other"])
            if any(name in part for part in parts)
        ]
        cards += (
            [Card("Parts of a step", legend=legend, bars=_bars(order, parts))]
            if order
            else []
        )
    if rows := table_of(runs):
        cards.append(Card("What they compute, and how", table=rows, left=names))
    if len(runs) > 1:
        cards.append(Card("Batch, speed, memory", table=machine_rows(runs)))
    notes = [text for run in runs if (text := how_to_profile(run))]
    return [Section("What a step computes", [Grid(cards, 2)], HINT, notes)]


def _bars(
    names: Sequence[str], runs: Sequence[dict[str, tuple[float, float, str]]]
) -> dict[str, list[Bar]]:
    """Return a bar for each name and run that has a profile, with its milliseconds,
    share and form.
    """
    rows = {}
    for name in names:
        cells = [
            (color(i), run.get(name, (0.0, 0.0, "")))
            for i, run in enumerate(runs)
            if run
        ]
        rows[name] = [(cell[0], tint, _cell(*cell)) for tint, cell in cells]
    return bars(rows)
