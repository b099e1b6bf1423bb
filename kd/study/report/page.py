"""Render one or several runs as a self-contained HTML file."""

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
from kd.study.report.confusion import prediction_sections
from kd.study.report.operators import operator_sections
from kd.study.report.record import (
    RunRecord,
    differences,
    mean_cells,
    price_rows,
    seed_groups,
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
    tiles, further_tiles = ([], []) if several else _tiles(runs[0])
    rows = [
        {"what": name, "value": value, "note": note}
        for value, name, note in [*tiles[TILES:], *further_tiles]
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
        more_numbers=Card(table=rows, left_columns=["note"]) if rows else None,
        findings=_findings(runs),
        judged=not any(run.unfinished and not run.findings for run in runs),
        sections=[
            *_compared(runs),
            *sections.paying(runs),
            *sections.curves(runs),
            *operator_sections(runs),
            *sections.time(runs),
            *sections.machine(runs),
            *prediction_sections(runs),
            *sections.variants(runs),
            *sections.chain(runs),
            *_costs(runs),
        ],
        settings=_settings(runs),
        notes=[f"{run.name}: {note}" for run in runs for note in run.notes],
        commands=[command for command in commands if command],
    )


def _lead(run: RunRecord) -> str:
    student = short_model(run.keys.get("student.model", ""))
    teacher = short_model(run.keys.get("teacher.model", ""))
    if teacher:
        return f"{student}, distilled from {teacher}"
    return f"{student}, trained on labels"


def _chips(run: RunRecord) -> list[str]:
    """Return facts about a run, "" for unknown ones."""
    environment = run.manifest.get("environment", {})
    machine = environment.get("machine", {})
    images = f"{run.manifest.get('images', 0):,} training images"
    if classes := len(run.manifest.get("classes", ())):
        images = f"{classes} classes, {images}"
    return [
        str(run.manifest.get("date", "")),
        f"{run.keys.get('data.kind', '')}, {images}",
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
    """Return a model's name without folders; for an export that of its run."""
    text = str(name or "")
    return text.rstrip("/").removesuffix("/export").rpartition("/")[2] or text


def _tiles(run: RunRecord) -> tuple[list[Tile], list[Tile]]:
    """Return the most telling numbers with their intervals, and further ones."""
    decides = run.selection_metric
    first = _scores(run, decides)
    further = [
        tile
        for column in run.scores.own
        if column != decides
        for tile in _scores(run, column)
    ]
    pairs = []
    for column in run.scores.pair_in(run.counted):
        meaning = "" if pairs else column.meaning
        value = column.text(run.counted[column.key])
        pairs.append((value, column.title, meaning))
    parameters = run.manifest.get("parameters", {})
    sizes = [
        (
            f"{format_number(parameters[model] / 1e6)} M",
            f"parameters of the {model}",
            "",
        )
        for model in ("student", "teacher")
        if parameters.get(model)
    ]
    for tiles in (pairs, sizes, _graphs(run)):
        first += tiles[:1]
        further += tiles[1:]
    return first, [*further, *_circumstances(run)]


def _graphs(run: RunRecord) -> list[Tile]:
    """Return the CPU time and the size of each exported graph."""
    files = run.exported.get("files", {})
    tiles = []
    for name in graphs_by_priority(run.exported):
        if cpu_ms := run.exported["parity"][name].get("cpu_ms"):
            size = sum(files[file]["bytes"] for file in registry.graph_files(name))
            mib = f"{size / 2**20:.3g} MiB"
            tiles.append((f"{cpu_ms:.3g} ms", f"per image on the CPU, {name}", mib))
    return tiles


def _circumstances(run: RunRecord) -> list[Tile]:
    """Return how the run went and what it cost."""
    tiles = []
    column = run.selection_metric
    if len(run.val) > 1 and column.key in run.best:
        tested = run.scored is not None and run.scored.split == "test"
        note = "" if tested else "on this split, which flatters it"
        name = f"validation {column.title}, chosen from {len(run.val)} evaluations"
        tiles.append((column.text(run.best[column.key]), name, note))
    if run.train:
        speed = f"{run.images_per_second:,.0f}"
        tiles.append(
            (speed, "images per second", f"{format_seconds(run.seconds)} of training")
        )
    for home in run.manifest.get("teacher_home", {}).values():
        if "equal" in home:
            name = "same top class as the teacher under its own preprocessing"
            tiles.append((percent(home["equal"]), name, home["text"]))
    if run.skipped:
        steps = f"{run.skipped} of {run.steps}"
        note = "their gradient was NaN or infinite"
        tiles.append((steps, "steps were skipped", note))
    if run.cost:
        price = f"{format_seconds(run.billable)} at $ {run.per_hour:g} an hour"
        tiles.append((f"$ {format_dollars(run.cost)}", "for this run", price))
    return tiles


def _scores(run: RunRecord, column: Column) -> list[Tile]:
    """Return a score of the student, its teachers and the baseline with intervals."""
    title = f"{run.split} {column.title}"
    models: list[tuple[str, Mapping[str, Any], Mapping[str, Samples]]] = [
        (title, run.counted, run.samples)
    ]
    for name, values in run.scores.of_teachers(run.counted).items():
        samples = {} if run.scored is None else run.scored.of(name)
        models.append((f"{title}, {name}", values, samples))
    if run.baseline is not None:
        baseline = run.baseline
        models.append((f"{title}, labels only", baseline.counted, baseline.samples))
    tiles = []
    for name, values, samples in models:
        if column.key in values:
            text = column.text(values[column.key], samples.get(column.key))
            value, _, ends = text.partition(" (")
            interval = f"95 % interval {ends.removesuffix(')')}" if ends else ""
            tiles.append((value, name, interval))
    return tiles


def _compared(runs: Sequence[RunRecord]) -> list[Section]:
    if len(runs) < 2:
        return []
    entries: list[tuple[str, RunRecord]] = []
    for run in runs:
        entries.append((run.name, run))
        if run.baseline is not None:
            entries.append((f"{run.name}, labels only", run.baseline))
    titles = [title for _, run in entries for title in run.scores.cells(run.counted)]
    score_blanks = dict.fromkeys(titles, "-")
    rows = [{"run": name, **score_blanks, **_run_cells(run)} for name, run in entries]
    blank = dict.fromkeys(rows[0], "-")
    for name, values in teachers_of(runs).items():
        rows.append(blank | {"run": name} | runs[0].scores.cells(values))
    for group in seed_groups(runs):
        title = f"mean of {len(group)} seeds"
        end = ", with its 95 % interval"
        rows.append(blank | {"run": title + end} | mean_cells(group))
        baselines = [run.baseline for run in group if run.baseline]
        if len(baselines) == len(group):
            title += ", labels only"
            rows.append(blank | {"run": title + end} | mean_cells(baselines))
    cards = [Card("Results", table=rows, notes=verdicts(runs))]
    if changed := differences(runs):
        names = [run.name for run in runs]
        title = "What differs in the configuration"
        cards.append(Card(title, table=changed, left_columns=names))
    return section("Side by side", cards)


def _run_cells(run: RunRecord) -> dict[str, str]:
    """Return the scores, steps and speed of a run as cells of a table."""
    images = run.split
    if run.scored is not None:
        images = f"{run.scored.images:,} {run.split}"
    steps = f"{run.steps:,}"
    if run.skipped:
        steps += f", {run.skipped:,} skipped"
    return {
        **run.scores.cells(run.counted, run.samples),
        "scored on": images,
        "steps": steps,
        "images/s": f"{run.images_per_second:,.0f}",
        "training": format_seconds(run.seconds),
    }


def _costs(runs: Sequence[RunRecord]) -> list[Section]:
    if not any(run.cost for run in runs):
        return []
    hint = ""
    if any(run.cost and not run.keys.get("price.per_hour") for run in runs):
        hint = f"On-demand list prices of {instances.PRICED_ON}, us-east-1. "
    hint += (
        "Cost = price an hour x billable time. Billable is the time from start to end,"
        " with set-up and evaluations."
    )
    return section("Costs", [Card(table=price_rows(runs))], hint)


def _settings(
    runs: Sequence[RunRecord],
) -> dict[str, list[tuple[str, bool, list[Any]]]]:
    """Return keys by section, whether the runs differ in one, and its values.

    There is one value for all runs, or one per run.
    """
    changed = {row["key"] for row in differences(runs)}
    settings: dict[str, list[tuple[str, bool, list[Any]]]] = {}
    for key in dict.fromkeys(key for run in runs for key in run.keys):
        values = [run.keys.get(key, "") for run in runs]
        if key not in changed and key != "run.name":
            values = values[:1]
        rows = settings.setdefault(key.partition(".")[0], [])
        rows.append((key, key in changed, values))
    return settings
