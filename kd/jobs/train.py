"""Teacher, student, baseline, report: the main job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kd.artifacts.run_dir import RunDir
from kd.config import Config
from kd.files.storage import write_text
from kd.jobs.check import check
from kd.jobs.distill import Result, distill
from kd.jobs.folder import open_run
from kd.jobs.teach import obtain_teacher
from kd.progress.console import COLUMNS, scored_by
from kd.references import redact
from kd.report.report import read
from kd.report.text import curves
from kd.setup.build import distributed
from kd.setup.data import open_data
from kd.setup.recipe import Recipe
from kd.text import percent, table


def train(settings: Config) -> Result:
    """Run a configuration: fit the teacher if needed, distill, train the baseline if asked, write the report.

    Raises:
        KdError: anything that the user can repair, in one line.
    """
    started, recipe = time.monotonic(), Recipe(settings)
    check(recipe)  # what can be known now must not be found out after the teacher was fitted
    with distributed(recipe.backend) as backend:
        data = open_data(recipe.data, recipe.run.folder, backend)
        with open_run(recipe, backend.rank) as folder, billed(folder, started):
            teacher, data = obtain_teacher(recipe, data, backend)
            result = distill(recipe, data, backend, teacher, folder, recipe.name)
            if recipe.baseline is not None:
                alone, title = Recipe(recipe.baseline, recipe.path / "labels_only"), f"{recipe.name} (labels only)"
                with open_run(alone, backend.rank) as inner:
                    baseline = distill(alone, data, backend, None, inner, title, result.batch_size)
                result = replace(result, baseline=baseline)
            told = report(recipe.name, recipe.seed, result)
            if backend.rank == 0:
                result = replace(result, report=redact(told + curves(read(recipe.path, images=-1))))
                write_text(recipe.path / "report.md", result.report)
    return result


@contextmanager
def billed(folder: RunDir, started: float) -> Iterator[None]:
    """Record how long this start and all earlier ones took, from the command on, which is what a rented machine costs.

    Not counted: the time of a start whose process was killed.
    """
    before = float(folder.manifest().get("billable_seconds", 0.0))
    try:
        yield
    finally:
        folder.record(billable_seconds=round(before + time.monotonic() - started, 3))


def report(name: str, seed: int, result: Result) -> str:
    """Return the table of a run as Markdown, and what to type next."""
    if not result.metrics:
        return ""
    score = scored_by(result.metrics)
    if score not in COLUMNS:
        if score == "knn" or "kl" not in result.metrics:
            return _embedding_report(name, seed, result)
        return "\n".join([f"# {name}", "", table([_unlabelled(result)]), "", *_closing(seed, result)])
    rows = []
    if f"teacher_{score}" in result.metrics:
        rows.append(_row("teacher", result.metrics, result.teacher_parameters, None, "teacher_"))
    rows.append(
        _row("student, distilled" if rows else "student", result.metrics, result.parameters, result.images_per_second)
    )
    if result.baseline is not None:
        alone = result.baseline
        rows.append(_row("student, labels only", alone.metrics, alone.parameters, alone.images_per_second))
    lines = [f"# {name}", "", table(rows), ""]
    if "agreement" in result.metrics:
        what = "validation images" if score == "accuracy" else "labels that one of them gives an image"
        lines += [f"Student and teacher agree on {percent(result.metrics['agreement'])} of the {what}.", ""]
    if result.sifting:
        lines += [result.sifting]
    return "\n".join([*lines, *_closing(seed, result)])


def _closing(seed: int, result: Result) -> list[str]:
    return [
        f"Best of the evaluations on the validation split; seed {seed}; run folder `{result.folder}`.",
        "",
        f"Next: `kd-export {result.folder}` writes a folder that timm loads; `kd-report {result.folder}` a page about "
        "the run.",
        "",
    ]


def _unlabelled(result: Result) -> dict[str, str]:
    """Return the row of a student whose images have no labels: it is compared with its teacher."""
    values = result.metrics
    return {
        "model": "student, distilled without labels",
        "agreement with the teacher": percent(values["agreement"]),
        "KL, nats": f"{values['kl']:.3f}",
        **({"calibration error against it": percent(values["agreement_ece"])} if "agreement_ece" in values else {}),
        "parameters": f"{result.parameters / 1e6:.2f} M",
        "training images/s": f"{result.images_per_second:.0f}",
    }


def _embedding_report(name: str, seed: int, result: Result) -> str:
    """Return the table of a run that trained an embedding model, and what to type next."""
    values, decides = result.metrics, "agreement"
    rows = []
    if "knn" in values:
        decides = "nearest neighbours (knn)"
        numbers = [key.removeprefix("teacher_knn") for key in values if key.startswith("teacher_knn")]
        rows = [(f"teacher{end.replace('_', ' ')}", f"teacher_knn{end}", f"teacher_probe{end}") for end in numbers]
    rows = [{"model": one, "knn": percent(values[knn]), "probe": percent(values[probe])} for one, knn, probe in rows]
    student = {"model": "student", "knn": percent(values.get("knn", 0.0)), "probe": percent(values.get("probe", 0.0))}
    shown = table([*rows, student]) if rows else ""
    return "\n".join(
        [
            f"# {name}",
            "",
            *([shown, ""] if shown else []),
            f"Agreement of the projected student with the teacher: mean cosine {values['agreement']:.4f}; "
            f"{result.parameters / 1e6:.2f} M parameters; {result.images_per_second:.0f} training images/s.",
            "",
            f"Best of the evaluations on the validation split by {decides}; seed {seed}; run folder `{result.folder}`.",
            "",
            f"Next: `kd-export {result.folder}` writes a folder that timm loads, and a graph that returns vectors.",
            "",
        ]
    )


def _row(name: str, values: dict[str, float], parameters: int, speed: float | None, prefix: str = "") -> dict[str, str]:
    return {
        "model": name,
        **{title: percent(values[prefix + key]) for key, title in COLUMNS[scored_by(values)].items()},
        "parameters": f"{parameters / 1e6:.2f} M",
        "training images/s": f"{speed:.0f}" if speed else "-",
    }
