"""Teacher, student, baseline, report: the main job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kd import build
from kd.artifacts.run_dir import RunDir
from kd.config import Config
from kd.jobs._folder import enter
from kd.jobs._student import Result, distil
from kd.jobs._world import prepared, world
from kd.jobs.check import check
from kd.jobs.teach import obtain_teacher
from kd.parts import default_options
from kd.report.console import percent, table
from kd.schema import LossSection, SifterSection, TeacherSection
from kd.storage import write_text


def train(settings: Config) -> Result:
    """Run a configuration: fit the teacher if needed, distil, train the baseline if asked, write the report.

    Raises:
        KdError: anything that the user can repair, in one line.
    """
    check(settings)  # nothing that can be known now may be found out after the teacher was fitted
    with world(settings) as backend:
        data = prepared(settings, backend)
        folder = RunDir(Path(settings.run.folder) / settings.run.name, backend.rank, settings.run.keep)
        enter(folder, settings)
        try:
            teacher = obtain_teacher(settings, data, backend)
            result = distil(settings, data, backend, teacher, folder, settings.run.name)
            if settings.run.baseline:
                alone = labels_alone(settings, result.batch_size)
                inner = RunDir(folder.path / "labels_only", backend.rank, settings.run.keep)
                enter(inner, alone)
                try:
                    baseline = distil(alone, data, backend, None, inner, f"{settings.run.name} (labels only)")
                finally:
                    inner.close()
                result = replace(result, baseline=baseline)
            result = replace(result, report=report(settings, result))
            if backend.rank == 0:
                write_text(folder.path / "report.md", result.report)
        finally:
            folder.close()
    return result


def labels_alone(settings: Config, batch_size: int) -> Config:
    """Return the same run without its teacher: same student, steps, batches and views; cross-entropy only."""
    return replace(
        settings,
        data=replace(settings.data, batch_size=batch_size, views=build.views(settings)),
        run=replace(settings.run, baseline=False),
        teacher=TeacherSection(),
        losses=(LossSection(kind="ce", options=default_options("losses", "ce")),),
        sifter=SifterSection(options=default_options("sifters", "none")),
    )


def report(settings: Config, result: Result) -> str:
    """Return the table of a run as Markdown, and what to type next."""
    if not result.metrics:
        return ""
    rows = []
    if "teacher_accuracy" in result.metrics:
        rows.append(_row("teacher", result.metrics, result.teacher_parameters, None, "teacher_"))
    rows.append(
        _row("student, distilled" if rows else "student", result.metrics, result.parameters, result.images_per_second)
    )
    if result.baseline is not None:
        alone = result.baseline
        rows.append(_row("student, labels only", alone.metrics, alone.parameters, alone.images_per_second))
    lines = [f"# {settings.run.name}", "", table(rows), ""]
    if "agreement" in result.metrics:
        lines += [f"Student and teacher agree on {percent(result.metrics['agreement'])} of the validation images.", ""]
    if result.sifting:
        lines += [result.sifting]
    lines += [
        f"Best of the evaluations on the validation split; seed {settings.run.seed}; run folder `{result.folder}`.",
        "",
        f"Next: `kd-export {result.folder}` writes a folder that timm loads.",
        "",
    ]
    return "\n".join(lines)


def _row(name: str, values: dict[str, float], parameters: int, speed: float | None, prefix: str = "") -> dict[str, str]:
    return {
        "model": name,
        "accuracy": percent(values[f"{prefix}accuracy"]),
        "top-5": percent(values[f"{prefix}top5"]),
        "calibration error": percent(values[f"{prefix}ece"]),
        "parameters": f"{parameters / 1e6:.2f} M",
        "training images/s": f"{speed:.0f}" if speed else "-",
    }
