"""Teacher, student, baseline, report: the main job."""

from __future__ import annotations

import time
from dataclasses import replace

from kd.config import Config
from kd.core.references import redact
from kd.files.storage import write_text
from kd.jobs.check import check
from kd.jobs.distill import Result, distill
from kd.jobs.observe import accounted
from kd.jobs.opened import open_run, opened
from kd.jobs.teach import obtain_teachers
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
    with accounted(started), opened(recipe, obtain_teachers, started) as run:
        setting, folder = run.setting, run.folder
        assert folder is not None
        result = distill(recipe, setting, folder, record.name, final)
        if recipe.baseline is not None:
            alone, title = resolve(recipe.baseline, record.path / BASELINE), f"{record.name} (labels only)"
            with open_run(alone.record, setting.backend.rank) as inner:
                unaided = replace(setting, teachers=Teachers(None, setting.teachers.data))
                result = replace(result, baseline=distill(alone, unaided, inner, title, final))
        if setting.backend.rank == 0:
            text = summary(record.name, recipe.loop.seed, result, scores)
            text += curves(folder.metrics("train"), folder.metrics("val"), scores)
            result = replace(result, report=redact(text))
            write_text(record.path / "report.md", result.report)
    return result
