"""Evaluate the best student of a run, its teacher and their agreement; audit its data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from kd import config
from kd.jobs.teach import obtain_teachers
from kd.progress.console import Console
from kd.setup.build import Results, Setting, build_run, distributed
from kd.setup.data import open_data
from kd.setup.finished import Trust, load_distillation, opened_run, require_files
from kd.setup.recipe import resolve

log = logging.getLogger("kd")


def evaluate(path: Path, overrides: Sequence[str] = (), trust: bool = False, audit: bool = False) -> dict[str, float]:
    """Evaluate the best student of a run folder, its teacher and their agreement, on the validation split.

    `audit`: also list labels that the teacher doubts and images that repeat; what it found is logged.

    Raises:
        RunError: it is no run folder, or needs trust.
    """
    folder, stored = opened_run(path, trust)
    require_files(path, stored.data)
    recipe = resolve(config.load(config.to_dict(stored), overrides))
    vouched = Trust.of(trust, overrides, recipe.data.section)
    vouched.check_teacher(recipe.teacher)
    vouched.check_student(recipe.student)
    vouched.check_folder(recipe.data)
    best = folder.best()[1]
    results = Results(folder, Console("", quiet=True), folder.manifest().get("choices", {}))
    with distributed(recipe.backend) as backend:
        data = open_data(recipe.data, backend, fill=False)
        vouched.check_images(data, folder.manifest())
        teachers = obtain_teachers(recipe.teacher, data, backend)
        setting = Setting(teachers, backend, recipe.backend)
        run = build_run(recipe.teacher, recipe.student, recipe.loop, setting, results).run
        load_distillation(run.distillation, best)
        values = run.evaluator(run.distillation.student)
        if audit:
            from kd.jobs.audit import audit as audited  # only where it is asked for

            for line in audited(run, recipe, teachers.data, folder.path):
                log.info(line)
        return values
