"""A report for terminals and pull requests: Markdown with sparklines."""

from __future__ import annotations

from collections.abc import Sequence

from kd.core.text import clock, table
from kd.study.report.record import RunRecord, differences, mean_cells, price_rows, repeats, verdicts
from kd.study.report.summary import curves, skipped_text


def summary(runs: Sequence[RunRecord]) -> str:
    """Return runs as Markdown: curves, findings, means over seeds, costs, what differs."""
    lines = [f"# {', '.join(run.name for run in runs)}", ""]
    for run in runs:
        lines += ["", f"## {run.name}", ""] if len(runs) > 1 else []
        lines += [*_results(run), curves(run.train, run.val, run.scores), *_findings(run)]
    if compared := verdicts(runs):
        lines += ["On the same images, with the 95 % interval of the difference:", ""]
        lines += [*(f"- {line}" for line in compared), ""]
    for group in repeats(runs):
        cells = ", ".join(f"{title} {text}" for title, text in mean_cells(group).items())
        lines += [f"Mean of {len(group)} seeds ({', '.join(run.name for run in group)}), 95 % interval: {cells}.", ""]
    if any(run.cost for run in runs):
        lines += ["Costs:", "", table(price_rows(runs)), ""]
    if len(runs) > 1:
        names = [run.name for run in runs]
        rows = [{"key": key, **dict(zip(names, values, strict=True))} for key, values in differences(runs)]
        lines += ["What differs in the configuration:", "", table(rows), ""] if rows else ["One configuration.", ""]
    return "\n".join(lines)


def _results(run: RunRecord) -> list[str]:
    stands = [f"**{line}**", ""] if (line := unfinished_text(run)) else []
    if not run.best:
        return [*stands, "Not evaluated yet.", ""]
    parts = [run.scores.text(run.best)] if run.scored is None else [run.scores.conclusion(run.scored)]
    if run.baseline is not None and run.baseline.best:
        score, alone = run.baseline.decides, run.baseline
        parts.append(f"labels only {score.text(alone.counted[score.key], alone.samples.get(score.key))}")
    parts += [f"{run.images_per_second:.0f} images/s", f"{clock(run.seconds)} of training"]
    skipped = skipped_text(run.skipped, run.steps)
    note = [run.scored.note, ""] if run.scored is not None else []
    note += [leaks, ""] if run.answers is not None and (leaks := run.answers.without_leaks()) else []
    return [*stands, ", ".join(parts) + ".", "", *note, *([skipped, ""] if skipped else [])]


def unfinished_text(run: RunRecord) -> str:
    """Say that a run, or its baseline, has not come to its end; "": it has."""
    for one, who in ((run, run.name), (run.baseline, f"{run.name} (labels only)")):
        if one is not None and one.unfinished:
            ended = f"{who} has not finished: {one.unfinished}."
            return f"{ended} It was stopped, or it still runs; the command that started it resumes it."
    return ""


def _findings(run: RunRecord) -> list[str]:
    lines = []
    for one in run.findings:
        change = f"{one['key']}={one['value']}"
        advice = one["advice"].replace(change, f"`{change}`")
        lines.append(f"- **{one['rule']}** ({one['severity']}): {one['evidence']}. {advice}")
    return [*lines, ""] if lines else []
