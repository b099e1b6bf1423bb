"""Teacher, student, baseline, report: the main job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kd.config import Config
from kd.core.references import redact
from kd.files.run_dir import RunDir
from kd.files.storage import write_text
from kd.jobs.check import check
from kd.jobs.distill import Result, distill
from kd.jobs.folder import open_run
from kd.jobs.observe import accounted
from kd.jobs.teach import obtain_teachers
from kd.setup.build import Setting, distributed
from kd.setup.data import open_data
from kd.setup.recipe import BASELINE, resolve
from kd.setup.teacher import Teachers
from kd.study.report.summary import curves, summary


def train(settings: Config, before: float = 0.0, final: str = "test") -> Result:
    """Run a configuration: fit the teacher if needed, distill, train the baseline if asked, write the report.

    The time of the run begins `before` seconds ago, when its command began. `final`: "val" leaves test images alone.
    """
    started = time.perf_counter() - before
    recipe = resolve(settings)
    check(recipe)  # what can be known now must not be found out after the teacher was fitted
    record, scores = recipe.record, recipe.student.task.scores
    with accounted(started), distributed(recipe.backend) as backend:
        data = open_data(recipe.data, backend)
        with open_run(record, backend.rank) as folder, billed(folder, started):
            teachers = obtain_teachers(recipe.teacher, data, backend)
            setting = Setting(teachers, backend, recipe.backend)
            result = distill(recipe, setting, folder, record.name, final)
            if recipe.baseline is not None:
                alone, title = resolve(recipe.baseline, record.path / BASELINE), f"{record.name} (labels only)"
                with open_run(alone.record, backend.rank) as inner:
                    setting = replace(setting, teachers=Teachers(None, teachers.data))
                    baseline = distill(alone, setting, inner, title, final)
                result = replace(result, baseline=baseline)
            if backend.rank == 0:
                text = summary(record.name, recipe.loop.seed, result, scores)
                text += curves(folder.metrics("train"), folder.metrics("val"), scores)
                result = replace(result, report=redact(text))
                write_text(record.path / "report.md", result.report)
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
        folder.record(billable_seconds=round(before + time.perf_counter() - started, 3))
