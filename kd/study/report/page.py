"""One or several runs as one self-contained HTML file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kd.config import instances
from kd.core.intervals import Samples
from kd.core.scores import Column
from kd.core.text import format_dollars, format_number, format_seconds, percent
from kd.files.manifest import graphs_by_priority
from kd.files.templates import render_template
from kd.parts import registry
from kd.study.report import sections
from kd.study.report.confusion import answers
from kd.study.report.operators import operators
from kd.study.report.record import (
    RunRecord,
    differences,
    mean_cells,
    price_rows,
    repeats,
    teachers_of,
    verdicts,
)
from kd.study.report.view import Card, Section, color, section

TEMPLATE = Path(__file__).parent / "page.html.jinja"
TILES = 6  # most chips: a row at 1,120 px
Tile = tuple[str, str, str]  # value, name, note


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page of at least one run."""
    several = len(runs) > 1
    tiles, more = ([], []) if several else _tiles(runs[0])
    rows = [
        {"what": what, "value": value, "note": note}
        for value, what, note in [*tiles[TILES:], *more]
    ]
    commands = [run.manifest.get("environment", {}).get("command") for run in runs]
    return render_template(
        TEMPLATE,
        title=" · ".join(run.name for run in runs),
        lead=f"{len(runs)} runs side by side" if several else _lead(runs[0]),
        names=[(run.name, color(i)) for i, run in enumerate(runs)] if several else [],
        chips=[] if several else [chip for chip in _chips(runs[0]) if chip],
        unfinished=[run.unfinished_text for run in runs if run.unfinished_text],
        tiles=tiles[:TILES],
        more_numbers=Card(table=rows, left=["note"]) if rows else None,
        findings=_findings(runs),
        judged=not any(run.unfinished and not run.findings for run in runs),
        sections=[
            *_compared(runs),
            *sections.paying(runs),
            *sections.curves(runs),
            *operators(runs),
            *sections.time(runs),
            *sections.machine(runs),
            *answers(runs),
            *sections.variants(runs),
            *sections.chain(runs),
            *_costs(runs),
        ],
        settings=_settings(runs),
        notes=[f"{run.name}: {note}" for run in runs for note in run.notes],
        commands=[command for command in commands if command],
    )


def _lead(run: RunRecord) -> str:
    student, teacher = (
        short_model(run.keys.get(f"{who}.model", "")) for who in ("student", "teacher")
    )
    return (
        f"{student}, distilled from {teacher}"
        if teacher
        else f"{student}, trained on labels"
    )


def _chips(run: RunRecord) -> list[str]:
    """Return facts about a run, "" for unknown ones."""
    environment = run.manifest.get("environment", {})
    machine = environment.get("machine", {})
    images, classes = (
        run.manifest.get("images", 0),
        len(run.manifest.get("classes", ())),
    )
    return [
        str(run.manifest.get("date", "")),
        (
            f"{run.keys.get('data.kind', '')},"
            f" {f'{classes} classes, ' if classes else ''}{images:,} training images"
        ),
        f"step {run.steps:,}",
        f"{run.manifest.get('backend', 'cpu')} x {run.manifest.get('world_size', 1)}",
        (
            f"{machine.get('processor', '')}, {machine.get('cores', '?')} cores"
            if machine
            else ""
        ),
        f"kd {environment.get('packages', {}).get('kd', '')}" if environment else "",
    ]


def _findings(runs: Sequence[RunRecord]) -> list[dict[str, Any]] | None:
    """Return the findings of the rules; None where no run could have one."""
    if not any(
        "findings" in run.manifest or run.findings or run.timeline for run in runs
    ):
        return None
    return [
        {**finding, "who": f"{run.name}: " if len(runs) > 1 else ""}
        for run in runs
        for finding in run.findings
    ]


def short_model(name: object) -> str:
    """Return a model's name without folders; for an export the name of its run or
    teacher.
    """
    text = str(name or "")
    return text.rstrip("/").removesuffix("/export").rpartition("/")[2] or text


def _tiles(run: RunRecord) -> tuple[list[Tile], list[Tile]]:
    """Return the most telling numbers with their intervals, and further ones."""
    decides = run.selection_metric
    first = _scores(run, decides)
    rest = [
        tile
        for column in run.scores.own
        if column != decides
        for tile in _scores(run, column)
    ]
    pair = run.scores.pair_in(run.counted)
    pairs = [
        (
            column.text(run.counted[column.key]),
            column.title,
            "" if i else column.meaning,
        )
        for i, column in enumerate(pair)
    ]
    sizes = run.manifest.get("parameters", {})
    counts = [
        (f"{format_number(sizes[who] / 1e6)} M", f"parameters of the {who}", "")
        for who in ("student", "teacher")
        if sizes.get(who)
    ]
    graphs = _graphs(run)
    first = [*first, *pairs[:1], *counts[:1], *graphs[:1]]
    return first, [*rest, *pairs[1:], *counts[1:], *graphs[1:], *_circumstances(run)]


def _graphs(run: RunRecord) -> list[Tile]:
    """Return the CPU time and the size of each exported graph."""
    files = run.exported.get("files", {})
    tiles = []
    for name in graphs_by_priority(run.exported):
        if cpu_ms := run.exported["parity"][name].get("cpu_ms"):
            size = (
                sum(files[part]["bytes"] for part in registry.graph_files(name)) / 2**20
            )
            tiles.append(
                (f"{cpu_ms:.3g} ms", f"per image on the CPU, {name}", f"{size:.3g} MiB")
            )
    return tiles


def _circumstances(run: RunRecord) -> list[Tile]:
    """Return how the run went and what it cost."""
    decides, tiles = run.selection_metric, []
    if len(run.val) > 1 and decides.key in run.best:
        flatters = (
            ""
            if run.scored is not None and run.scored.split == "test"
            else "on this split, which flatters it"
        )
        best = f"validation {decides.title}, chosen from {len(run.val)} evaluations"
        tiles.append((decides.text(run.best[decides.key]), best, flatters))
    if run.train:
        speed = f"{run.images_per_second:,.0f}"
        tiles.append(
            (speed, "images per second", f"{format_seconds(run.seconds)} of training")
        )
    for home in run.manifest.get("teacher_home", {}).values():
        if "equal" in home:
            what = "same top class as the teacher under its own preprocessing"
            tiles.append((percent(home["equal"]), what, home["text"]))
    if run.skipped:
        tiles.append(
            (
                f"{run.skipped} of {run.steps}",
                "steps were skipped",
                "their gradient was NaN or infinite",
            )
        )
    if run.cost:
        price = f"{format_seconds(run.billable)} at $ {run.per_hour:g} an hour"
        tiles.append((f"$ {format_dollars(run.cost)}", "for this run", price))
    return tiles


def _scores(run: RunRecord, column: Column) -> list[Tile]:
    """Return value, name and interval of a score for the student, its teachers and the
    baseline.
    """
    scored = run.scored
    models: dict[str, tuple[Mapping[str, Any], Mapping[str, Samples]]] = {
        "": (run.counted, run.samples)
    }
    for name, values in run.scores.of_teachers(run.counted).items():
        models[f", {name}"] = values, scored.of(name) if scored is not None else {}
    if run.baseline is not None:
        models[", labels only"] = run.baseline.counted, run.baseline.samples
    tiles = []
    for name, (values, samples) in models.items():
        if column.key in values:
            value, _, ends = column.text(
                values[column.key], samples.get(column.key)
            ).partition(" (")
            interval = f"95 % interval {ends.removesuffix(')')}" if ends else ""
            tiles.append((value, f"{run.split} {column.title}{name}", interval))
    return tiles


def _compared(runs: Sequence[RunRecord]) -> list[Section]:
    if len(runs) < 2:
        return []
    entries: list[tuple[str, RunRecord]] = []
    for run in runs:
        entries += [(run.name, run)]
        entries += (
            [(f"{run.name}, labels only", run.baseline)]
            if run.baseline is not None
            else []
        )
    titles = {
        title: "-" for _, run in entries for title in run.scores.cells(run.counted)
    }
    rows = [
        {
            "run": name,
            **titles,
            **run.scores.cells(run.counted, run.samples),
            "scored on": (
                f"{run.scored.images:,} {run.split}"
                if run.scored is not None
                else run.split
            ),
            "steps": (
                f"{run.steps:,}" + (f", {run.skipped:,} skipped" if run.skipped else "")
            ),
            "images/s": f"{run.images_per_second:,.0f}",
            "training": format_seconds(run.seconds),
        }
        for name, run in entries
    ]
    blank = dict.fromkeys(rows[0], "-")
    rows += [
        blank | {"run": name} | runs[0].scores.cells(values)
        for name, values in teachers_of(runs).items()
    ]
    for group in repeats(runs):
        for name, same in (
            ("", group),
            (", labels only", [run.baseline for run in group if run.baseline]),
        ):
            if len(same) == len(group):
                title = f"mean of {len(group)} seeds{name}, with its 95 % interval"
                rows.append(blank | {"run": title} | mean_cells(same))
    cards = [Card("Results", table=rows, notes=verdicts(runs))]
    if changed := differences(runs):
        cards.append(
            Card(
                "What differs in the configuration",
                table=changed,
                left=[run.name for run in runs],
            )
        )
    return section("Side by side", cards)


def _costs(runs: Sequence[RunRecord]) -> list[Section]:
    if not any(run.cost for run in runs):
        return []
    priced = any(
        not float(run.keys.get("price.per_hour", 0) or 0) for run in runs if run.cost
    )
    hint = (
        f"On-demand list prices of {instances.PRICED_ON}, us-east-1. " if priced else ""
    )
    hint += (
        "Cost = price an hour x billable time. Billable is the time from start to end,"
        " with set-up and evaluations."
    )
    return section("Costs", [Card(table=price_rows(runs))], hint)


def _settings(
    runs: Sequence[RunRecord],
) -> dict[str, list[tuple[str, bool, list[Any]]]]:
    """Return by section the keys, whether the runs differ in it, and the values: one
    for all, or one per run.
    """
    changed = {row["key"] for row in differences(runs)}
    settings: dict[str, list[tuple[str, bool, list[Any]]]] = {}
    for key in {key: None for run in runs for key in run.keys}:
        values = [run.keys.get(key, "") for run in runs]
        values = values if key in changed or key == "run.name" else values[:1]
        settings.setdefault(key.partition(".")[0], []).append(
            (key, key in changed, values)
        )
    return settings
