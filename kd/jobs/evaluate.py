"""Evaluate the best student of a run, its teacher and their agreement; audit its data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from kd import config
from kd.core.errors import RunError
from kd.core.scores import Scored
from kd.jobs.epilogue import score
from kd.jobs.opened import opened
from kd.jobs.progress.console import Console
from kd.jobs.teach import obtain_teachers
from kd.setup.build import Results, build_run
from kd.setup.data import Data
from kd.setup.recipe import resolve
from kd.setup.student import load_distillation
from kd.study.finished import Trust, opened_run, require_files

log = logging.getLogger("kd")


def evaluate(
    path: Path, overrides: Sequence[str] = (), trust: bool = False, split: str = "val", audit: bool = False
) -> Scored:
    """Evaluate the best student of a run folder, its teacher and their agreement, on a split, "val" or "test".

    `audit`: also list labels that the teacher doubts and images that repeat; what it found is logged.
    """
    folder, stored = opened_run(path, trust)
    require_files(path, stored.data)
    recipe = resolve(config.load(config.to_dict(stored), overrides))
    vouched = Trust.of(trust, overrides, recipe.data)
    vouched.check_teacher(recipe.teacher)
    vouched.check_student(recipe.student)
    vouched.check_folder(recipe.data)
    state, best, _ = folder.best()
    results = Results(folder, Console("", quiet=True))

    def examine(data: Data) -> None:
        vouched.check_images(data, folder.manifest())
        if split == "test" and data.test is None:
            remedy = "Add data.test_split=FOLDER behind the run, or the key that its kind of data has (`kd help data`)"
            raise RunError("--split", "is test, but the data of the run names no test split", "val", remedy)

    with opened(recipe, obtain_teachers, fill=False, examine=examine) as run:
        built = build_run(recipe.teacher, recipe.student, recipe.loop, run.setting, results)
        load_distillation(built.run.distillation, best)
        scored = score(built, state.step, len(folder.metrics("val")), split == "test")
        if audit:
            from kd.jobs.audit import audit as audited  # only where it is asked for

            for line in audited(built.run, recipe, run.setting.teachers.data, folder.path):
                log.info(line)
        return scored
