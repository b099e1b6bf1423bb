"""One or several runs as one self-contained HTML file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kd.config import instances
from kd.core.intervals import Samples
from kd.core.scores import Column
from kd.core.text import clock, html_table, money, percent
from kd.files.manifest import served_first
from kd.parts import registry
from kd.study.report import sections
from kd.study.report.confusion import answers
from kd.study.report.operators import operators
from kd.study.report.record import RunRecord, differences, mean_cells, price_rows, repeats, teachers_of, verdicts
from kd.study.report.sections import card, color, esc, section
from kd.study.report.svg import legend, number

HERE = Path(__file__).parent
TILES = 6  # most chips: a row at 1,120 px


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page of at least one run."""
    title = runs[0].name if len(runs) == 1 else " · ".join(run.name for run in runs)
    body = [
        _head(runs, title),
        _tiles(runs[0]) if len(runs) == 1 else "",
        sections.findings(runs),
        _compared(runs),
        sections.paying(runs),
        sections.curves(runs),
        operators(runs),
        sections.time(runs),
        sections.machine(runs),
        answers(runs),
        sections.variants(runs),
        sections.chain(runs),
        _costs(runs),
        _configuration(runs),
    ]
    made = [esc(f"{run.name}: {note}") for run in runs for note in run.notes]
    commands = [run.manifest.get("environment", {}).get("command") for run in runs]
    made += [f"<code>{esc(command)}</code>" for command in commands if command]
    body += [f"<footer>{'<br>'.join(made)}</footer>"] if made else []
    style, script = (HERE / "page.css").read_text(), (HERE / "page.js").read_text()
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{esc(title)} · kd</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">"
        f'<link rel="icon" href="data:,"><style>{style}</style></head><body><main>{"".join(body)}</main>'
        f"<script>{script}</script></body></html>\n"
    )


def _head(runs: Sequence[RunRecord], title: str) -> str:
    run = runs[0]
    environment = run.manifest.get("environment", {})
    machine = environment.get("machine", {})
    student, teacher = (short_model(run.keys.get(f"{who}.model", "")) for who in ("student", "teacher"))
    lead = f"{student}, distilled from {teacher}" if teacher else f"{student}, trained on labels"
    lead = lead if len(runs) == 1 else f"{len(runs)} runs side by side"
    images, classes = run.manifest.get("images", 0), len(run.manifest.get("classes", ()))
    chips = [
        str(run.manifest.get("date", "")),
        f"{run.keys.get('data.kind', '')}, {f'{classes} classes, ' if classes else ''}{images:,} training images",
        f"step {run.steps:,}",
        f"{run.manifest.get('backend', 'cpu')} x {run.manifest.get('world_size', 1)}",
        f"{machine.get('processor', '')}, {machine.get('cores', '?')} cores" if machine else "",
        f"kd {environment.get('packages', {}).get('kd', '')}" if environment else "",
    ]
    names = legend([(run.name, color(i)) for i, run in enumerate(runs)]) if len(runs) > 1 else ""
    tags = "".join(f"<span>{esc(text)}</span>" for text in chips if text) if len(runs) == 1 else ""
    heading = f'<h1>{esc(title)}</h1><p class="lead">{esc(lead)}</p>'
    lines = [run.unfinished_text for run in runs if run.unfinished_text]
    ends = "".join(f'<div class="finding warning"><b>{esc(line)}</b></div>' for line in lines)
    return f'<header>{heading}{names}<div class="chips">{tags}</div>{ends}</header>'


def short_model(name: object) -> str:
    """Return a model's name without folders; for an export the name of its run or teacher."""
    text = str(name or "")
    return text.rstrip("/").removesuffix("/export").rpartition("/")[2] or text


def _tiles(run: RunRecord) -> str:
    """Show six numbers with their intervals, and a table of the others."""
    decides = run.selection_metric
    pair, sizes = run.scores.pair_in(run.counted), run.manifest.get("parameters", {})
    shown, rest = _scores(run, decides), [one for own in run.scores.own if own != decides for one in _scores(run, own)]
    pairs = [(one.text(run.counted[one.key]), one.title, "" if i else one.meaning) for i, one in enumerate(pair)]
    shown, rest = [*shown, *pairs[:1]], [*rest, *pairs[1:]]
    sized = [who for who in ("student", "teacher") if sizes.get(who)]
    counts = [(f"{number(sizes[who] / 1e6)} M", f"parameters of the {who}", "") for who in sized]
    files = run.exported.get("files", {})
    graphs = []
    for name in served_first(run.exported):
        if cpu_ms := run.exported["parity"][name].get("cpu_ms"):
            size = sum(files[part]["bytes"] for part in registry.graph_files(name)) / 2**20
            graphs.append((f"{cpu_ms:.3g} ms", f"per image on the CPU, {name}", f"{size:.3g} MiB"))
    shown, rest = [*shown, *counts[:1], *graphs[:1]], [*rest, *counts[1:], *graphs[1:]]
    if len(run.val) > 1 and decides.key in run.best:
        flatters = "" if run.scored is not None and run.scored.split == "test" else "on this split, which flatters it"
        best = f"validation {decides.title}, chosen from {len(run.val)} evaluations"
        rest.append((decides.text(run.best[decides.key]), best, flatters))
    if run.train:
        rest.append((f"{run.images_per_second:,.0f}", "images per second", f"{clock(run.seconds)} of training"))
    for one in run.manifest.get("teacher_home", {}).values():
        if "equal" in one:
            rest.append(
                (percent(one["equal"]), "same top class as the teacher under its own preprocessing", one["text"])
            )
    if run.skipped:
        rest.append((f"{run.skipped} of {run.steps}", "steps were skipped", "their gradient was NaN or infinite"))
    if run.cost:
        rest.append((f"$ {money(run.cost)}", "for this run", f"{clock(run.billable)} at $ {run.per_hour:g} an hour"))
    tiles = "".join(
        f'<div class="tile"><b>{esc(value)}</b><span>{esc(name)}</span><small>{esc(small)}</small></div>'
        for value, name, small in shown[:TILES]
    )
    rows = [{"what": what, "value": value, "note": note} for value, what, note in [*shown[TILES:], *rest]]
    return f'<div class="tiles">{tiles}</div>{card("", html_table(rows, ["note"]))}' if tiles else ""


def _scores(run: RunRecord, one: Column) -> list[tuple[str, str, str]]:
    """Return value, name and interval of a score for the student, its teachers and the baseline."""
    scored = run.scored
    models: dict[str, tuple[Mapping[str, Any], Mapping[str, Samples]]] = {"": (run.counted, run.samples)}
    for name, values in run.scores.of_teachers(run.counted).items():
        models[f", {name}"] = values, scored.of(name) if scored is not None else {}
    if run.baseline is not None:
        models[", labels only"] = run.baseline.counted, run.baseline.samples
    found = []
    for name, (values, samples) in models.items():
        if one.key in values:
            value, _, ends = one.text(values[one.key], samples.get(one.key)).partition(" (")
            small = f"95 % interval {ends.removesuffix(')')}" if ends else ""
            found.append((value, f"{run.split} {one.title}{name}", small))
    return found


def _compared(runs: Sequence[RunRecord]) -> str:
    if len(runs) < 2:
        return ""
    entries: list[tuple[str, RunRecord]] = []
    for run in runs:
        entries += [(run.name, run)]
        entries += [(f"{run.name}, labels only", run.baseline)] if run.baseline is not None else []
    titles = {title: "-" for _, run in entries for title in run.scores.cells(run.counted)}
    rows = [
        {
            "run": name,
            **titles,
            **run.scores.cells(run.counted, run.samples),
            "scored on": f"{run.scored.images:,} {run.split}" if run.scored is not None else run.split,
            "steps": f"{run.steps:,}" + (f", {run.skipped:,} skipped" if run.skipped else ""),
            "images/s": f"{run.images_per_second:,.0f}",
            "training": clock(run.seconds),
        }
        for name, run in entries
    ]
    blank = dict.fromkeys(rows[0], "-")
    rows += [blank | {"run": name} | runs[0].scores.cells(values) for name, values in teachers_of(runs).items()]
    for group in repeats(runs):
        for name, same in (("", group), (", labels only", [run.baseline for run in group if run.baseline])):
            if len(same) == len(group):
                title = f"mean of {len(group)} seeds{name}, with its 95 % interval"
                rows.append(blank | {"run": title} | mean_cells(same))
    shown = html_table(rows) + "".join(f'<p class="hint">{esc(line)}</p>' for line in verdicts(runs))
    changed = html_table(differences(runs), [run.name for run in runs])
    cards = [card("Results", shown), card("What differs in the configuration", changed)]
    return section("Side by side", "", *cards)


def _costs(runs: Sequence[RunRecord]) -> str:
    if not any(run.cost for run in runs):
        return ""
    priced = any(not float(run.keys.get("price.per_hour", 0) or 0) for run in runs if run.cost)
    hint = f"On-demand list prices of {instances.PRICED_ON}, us-east-1. " if priced else ""
    hint += "Cost = price an hour x billable time. Billable is the time from start to end, with set-up and evaluations."
    return section("Costs", hint, card("", html_table(price_rows(runs))))


def _configuration(runs: Sequence[RunRecord]) -> str:
    changed = {row["key"] for row in differences(runs)}
    groups: dict[str, list[str]] = {}
    for key in {key: None for run in runs for key in run.keys}:
        values = [run.keys.get(key, "") for run in runs]
        kind = "text changed" if key in changed else "text"
        values = values if key in changed or key == "run.name" else values[:1]
        cells = "".join(f'<td class="{kind}"><code>{esc(value)}</code></td>' for value in values)
        groups.setdefault(key.partition(".")[0], []).append(f"<tr><td>{esc(key)}</td>{cells}</tr>")
    details = "".join(
        f"<details><summary>{esc(name)}</summary><div><table>{''.join(rows)}</table></div></details>"
        for name, rows in groups.items()
    )
    return section("Configuration", "", details)
