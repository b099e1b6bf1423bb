"""Evaluate the best student of a run, its teacher and their agreement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kd import build, config
from kd.jobs._folder import opened_run
from kd.jobs._world import prepared, world
from kd.jobs.export import load_student
from kd.jobs.teach import obtain_teacher
from kd.report.console import Console


def evaluate(path: Path, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Evaluate the best student of a run folder, its teacher and their agreement, on the validation split."""
    folder, stored = opened_run(path)
    settings = config.load(config.to_dict(stored), overrides)
    best = folder.best()[1]
    with world(settings) as backend:
        data = prepared(settings, backend, fill=False)
        teacher = obtain_teacher(settings, data, backend)
        run, _ = build.run(
            settings, data, backend, teacher, folder, Console("", quiet=True), folder.manifest()["choices"]
        )
        load_student(run.distillation.student, best)  # type: ignore[arg-type]
        return run.evaluator(run.distillation.student)
