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
from kd.progress.summary import curves, summary
from kd.references import redact
from kd.setup.build import distributed
from kd.setup.data import open_data
from kd.setup.recipe import Recipe
from kd.tasks_scores_tmp import stand_in


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
            if backend.rank == 0:
                scores = stand_in(recipe.reads.student_logits, recipe.reads.sigmoid)  # the task's
                text = summary(recipe.name, recipe.seed, result, scores)
                text += curves(folder.metrics("train"), folder.metrics("val"), scores)
                result = replace(result, report=redact(text))
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
