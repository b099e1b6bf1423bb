"""One or several runs as one HTML file that needs nothing from elsewhere."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kd.config import instances
from kd.core.intervals import Samples
from kd.core.text import clock, html_table, money, percent
from kd.files.manifest import served_first
from kd.study.report import sections
from kd.study.report.confusion import answers
from kd.study.report.record import RunRecord, differences, mean_cells, price_rows, repeats, teachers_of, verdicts
from kd.study.report.sections import card, color, esc, section
from kd.study.report.svg import legend, number

HERE = Path(__file__).parent


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page of at least one run."""
    title = runs[0].name if len(runs) == 1 else " · ".join(run.name for run in runs)
    body = [
        _head(runs, title),
        _tiles(runs[0]) if len(runs) == 1 else "",
        sections.findings(runs),
        _compared(runs),
        sections.curves(runs),
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
    """Return a model's name without folders; of an export that of the run or teacher that it is of."""
    text = str(name or "")
    return text.rstrip("/").removesuffix("/export").rpartition("/")[2] or text


def _tiles(run: RunRecord) -> str:
    tiles = [*_score_tiles(run), *_size_tiles(run)]
    if run.train:
        tiles.append((f"{run.images_per_second:,.0f}", "images a second", f"{clock(run.seconds)} of training"))
    for one in run.manifest.get("teacher_home", {}).values():
        if "equal" in one:
            tiles.append((percent(one["equal"]), "same top class as the teacher at home", one["text"]))
    if run.skipped:
        tiles.append((f"{run.skipped} of {run.steps}", "steps were skipped", "their gradient was NaN or infinite"))
    if run.cost:
        tiles.append((f"$ {money(run.cost)}", "for this run", f"{clock(run.billable)} at $ {run.per_hour:g} an hour"))
    content = "".join(
        f'<div class="tile"><b>{esc(value)}</b><span>{esc(name)}</span><small>{esc(small)}</small></div>'
        for value, name, small in tiles
    )
    return f'<div class="tiles">{content}</div>' if content else ""


def _size_tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return value, name and small print of the student's size, and of its speed where it was exported."""
    tiles, sizes, small = [], run.manifest.get("parameters", {}), ""
    if sizes:
        student, teacher = sizes["student"], sizes.get("teacher", 0)
        if teacher:
            small = f"teacher {number(teacher / 1e6)} M, {number(teacher / student)} times as many"
        tiles.append((f"{number(student / 1e6)} M", "parameters", small))
    for name in served_first(run.exported):
        graph = run.exported["parity"][name]
        if "cpu_ms" in graph:
            small = f"export/{name}, {run.exported['files'][name]['bytes'] / 2**20:.3g} MiB, when it was exported"
            tiles.append((f"{graph['cpu_ms']:.3g} ms", "an image on the CPU", small))
    return tiles


def _score_tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return value, name and small print: one tile for each own score, one for the student against its teacher."""
    best, tiles = run.counted, []
    tested = run.scored is not None and run.scored.split == "test"
    chosen = f"best of {len(run.val)} evaluations on this split, which flatters it"
    if tested:
        chosen = f"validation {run.decides.text(run.best[run.decides.key])}, the best of {len(run.val)} evaluations"
    others: dict[str, tuple[Mapping[str, Any], Mapping[str, Samples]]] = {
        name: (values, run.scored.of(name) if run.scored is not None else {})
        for name, values in run.scores.of_teachers(best).items()
    }
    if run.baseline is not None:
        others["labels only"] = (run.baseline.counted, run.baseline.samples)
    for one in run.scores.own:
        if one.key in best:
            ends = one.text(best[one.key], run.samples.get(one.key)).partition(" (")[2].removesuffix(")")
            beside = [f"95 % interval {ends}"] if ends else []
            beside += [
                f"{name} {one.text(v[one.key], s.get(one.key))}" for name, (v, s) in others.items() if one.key in v
            ]
            beside += [chosen] if one == run.decides and len(run.val) > 1 else []
            tiles.append((one.text(best[one.key]), f"{run.split} {one.title}", ", ".join(beside)))
    pair = run.scores.pair_in(best)
    if pair:
        small = [pair[0].meaning, *(one.with_title(best[one.key]) for one in pair[1:])]
        tiles.append((pair[0].text(best[pair[0].key]), pair[0].title, "; ".join(filter(None, small))))
    return tiles


def _compared(runs: Sequence[RunRecord]) -> str:
    entries: list[tuple[str, RunRecord]] = []
    for run in runs:
        entries += [(run.name, run)]
        entries += [(f"{run.name}, labels only", run.baseline)] if run.baseline is not None else []
    if len(entries) < 2:
        return ""
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
    blank, teachers = dict.fromkeys(rows[0], "-"), teachers_of(runs).items() if len(runs) > 1 else ()
    rows += [blank | {"run": name} | runs[0].scores.cells(values) for name, values in teachers]
    for group in repeats(runs):
        for name, same in (("", group), (", labels only", [run.baseline for run in group if run.baseline])):
            if len(same) == len(group):
                title = f"mean of {len(group)} seeds{name}, with its 95 % interval"
                rows.append(blank | {"run": title} | mean_cells(same))
    shown = html_table(rows) + "".join(f'<p class="hint">{esc(line)}</p>' for line in verdicts(runs))
    if len(runs) == 1:
        return section("Side by side", "", card("Distilled, and the same student on labels alone", shown))
    names = [run.name for run in runs]
    changed = [{"key": key, **dict(zip(names, values, strict=True))} for key, values in differences(runs)]
    cards = [card("Results", shown), card("What differs in the configuration", html_table(changed, names))]
    return section("Side by side", "", *cards)


def _costs(runs: Sequence[RunRecord]) -> str:
    if not any(run.cost for run in runs):
        return ""
    priced = any(not float(run.keys.get("price.per_hour", 0) or 0) for run in runs if run.cost)
    hint = f"On-demand list prices of {instances.PRICED_ON}, us-east-1. " if priced else ""
    hint += "Cost = price an hour x billable time. Billable is the time from start to end, with set-up and evaluations."
    return section("Costs", hint, card("", html_table(price_rows(runs))))


def _configuration(runs: Sequence[RunRecord]) -> str:
    changed = {key for key, _ in differences(runs)} if len(runs) > 1 else set()
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
