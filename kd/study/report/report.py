"""Turn run folders into one HTML page and a summary for terminals."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kd import config
from kd.core.errors import RunError, error_summary
from kd.core.references import redact
from kd.core.text import as_one_line, markdown_table
from kd.files.json_file import DAMAGE, object_of, read_json
from kd.files.run_dir import RunDir
from kd.files.storage import read_rows, write_text
from kd.setup.finished import Trust, opened_run
from kd.setup.provenance import chain_lines
from kd.setup.recipe import Recipe, resolve
from kd.study.report.operators import how_to_profile, operator_rows, profile_of
from kd.study.report.page import render
from kd.study.report.predictions import read_predictions
from kd.study.report.record import (
    RunRecord,
    differences,
    mean_cells,
    price_rows,
    record_of,
    seed_groups,
    verdicts,
)
from kd.study.report.summary import summary_lines


@dataclass(frozen=True, slots=True)
class Report:
    """The written report and its summary."""

    file: Path
    size: int  # bytes of the page
    summary: str  # Markdown


def report(
    paths: Sequence[Path],
    target: Path | None = None,
    images: int = 2000,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> Report:
    """Write the page of one or several runs.

    The page is `target`, or report.html in the first folder. `images`: validation
    images to predict, 0: all. `overrides` of the runs' configurations give the data's
    present folder or the machine's price; `trust` runs code named there.
    """
    file = target or paths[0] / "report.html"
    with _damage_as_one_line(paths):
        runs = with_distinct_names(
            [read_run(path, images, overrides, trust) for path in paths]
        )
        page = redact(render(runs))
        text = redact(summary(runs))
    write_text(file, page, "--to")
    return Report(file, len(page.encode()), text)


def prices(
    paths: Sequence[Path], overrides: Sequence[str] = (), trust: bool = False
) -> list[dict[str, str]]:
    """Return a table that compares the costs of runs."""
    with _damage_as_one_line(paths):
        runs = with_distinct_names(
            [record_of(*_opened(path, overrides, trust)) for path in paths]
        )
        if not any(run.cost for run in runs):
            remedy = (
                "Add price.instance=ml.g5.xlarge, or price.per_hour=1.5, behind the"
                " runs"
            )
            raise RunError(
                "price.instance",
                "no run has a price",
                "The machine, or its price an hour",
                remedy,
            )
        return price_rows(runs)


@contextmanager
def _damage_as_one_line(paths: Sequence[Path]) -> Iterator[None]:
    """Convert an error from foreign values in a run's files into one line."""
    try:
        yield
    except DAMAGE as error:
        wrong = (
            f"a file in '{', '.join(map(str, paths))}' is corrupt or was edited"
            f" ({error_summary(error)})"
        )
        remedy = (
            "Restore it; metrics.jsonl and manifest.json are needed, the other .json"
            " and .jsonl may be removed"
        )
        raise RunError("run", wrong, "", remedy) from error


def with_distinct_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Number repeated run names."""
    names = [run.name for run in runs]
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [
        replace(run, name=f"{run.name} ({n})") if n > 1 else run
        for run, n in zip(runs, counts, strict=True)
    ]


def read_run(
    path: Path, images: int, overrides: Sequence[str] = (), trust: bool = False
) -> RunRecord:
    """Read a run folder, without predictions if the number of images is negative."""
    folder, recipe = _opened(path, overrides, trust)
    predictions = None
    note = ""
    if images >= 0 and folder.best_row():
        vouched = Trust.of(trust, overrides, recipe.data)
        predictions, note = read_predictions(folder, recipe, images, vouched)
    return replace(
        record_of(folder, recipe),
        timeline={
            int(file.stem.rpartition("_")[2]): read_rows(file)
            for file in sorted(path.glob("timeline_*.jsonl"))
        },
        monitor={
            file.stem.partition("_")[2]: read_rows(file)
            for file in sorted(path.glob("monitor_*.jsonl"))
        },
        answers=predictions,
        exported=_json_if_any(path / "export" / "manifest.json"),
        profile=_json_if_any(path / "profile" / "operators.json", profile_of),
        notes=(note,) if note else (),
    )


def _json_if_any(
    file: Path, build: Callable[[Any], dict[str, Any]] = object_of
) -> dict[str, Any]:
    """Return the content of a file; {} without it."""
    return read_json(file, "run", "Remove the file", build) if file.is_file() else {}


def _opened(path: Path, overrides: Sequence[str], trust: bool) -> tuple[RunDir, Recipe]:
    folder, stored = opened_run(path, trust)
    return folder, resolve(config.load(config.to_dict(stored), overrides, here=False))


def summary(runs: Sequence[RunRecord]) -> str:
    """Return runs as Markdown: each run, and comparisons of several."""
    several = len(runs) > 1
    lines = [f"# {', '.join(run.name for run in runs)}", ""]
    for run in runs:
        if several:
            lines += ["", f"## {run.name}", ""]
        lines += [*summary_lines(run), *_finding_lines(run)]
        if chain := chain_lines(run.exported):
            lines += ["Where the export comes from:", "", "```", *chain, "```", ""]
    if several and (comparisons := verdicts(runs)):
        lines += ["On the same images, with the 95 % interval of the difference:", ""]
        lines += [*(f"- {line}" for line in comparisons), ""]
    for group in seed_groups(runs):
        names = ", ".join(run.name for run in group)
        cells = ", ".join(
            f"{title} {text}" for title, text in mean_cells(group).items()
        )
        mean = f"Mean of {len(group)} seeds ({names}), 95 % interval: {cells}."
        lines += [mean, ""]
    if any(run.cost for run in runs):
        lines += ["Costs:", "", markdown_table(price_rows(runs)), ""]
    if several:
        if rows := operator_rows(runs):
            lines += ["Profiled, milliseconds per image:", "", markdown_table(rows), ""]
        lines += [f"{text}\n" for run in runs if (text := how_to_profile(run))]
        if rows := differences(runs):
            lines += [
                "What differs in the configuration:",
                "",
                markdown_table(rows),
                "",
            ]
        else:
            lines += ["One configuration.", ""]
    # names and values are a stranger's too
    return "\n".join(map(as_one_line, "\n".join(lines).split("\n")))


def _finding_lines(run: RunRecord) -> list[str]:
    """Return the findings of a run's rules as lines of Markdown."""
    lines = []
    for finding in run.findings:
        change = f"{finding['key']}={finding['value']}"
        advice = finding["advice"].replace(change, f"`{change}`")
        head = f"- **{finding['rule']}** ({finding['severity']})"
        lines.append(as_one_line(f"{head}: {finding['evidence']}. {advice}"))
    return [*lines, ""] if lines else []
