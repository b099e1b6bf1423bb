"""Evaluate the best student of a run, its teacher and their agreement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kd import config
from kd.jobs.teach import obtain_teacher
from kd.progress.console import Console
from kd.setup.build import build_run, distributed
from kd.setup.data import open_data
from kd.setup.finished import load_distillation, opened_run
from kd.setup.recipe import Recipe


def evaluate(path: Path, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Evaluate the best student of a run folder, its teacher and their agreement, on the validation split."""
    folder, stored = opened_run(path)
    settings = config.load(config.to_dict(stored), overrides)
    recipe = Recipe(settings)
    best, recorded = folder.best()[1], folder.manifest()["choices"]
    with distributed(recipe.backend) as backend:
        data = open_data(recipe.data, recipe.run.folder, backend, fill=False)
        teacher, data = obtain_teacher(recipe, data, backend)
        run = build_run(recipe, data, backend, teacher, folder, Console("", quiet=True), recorded).run
        load_distillation(run.distillation, best)
        return run.evaluator(run.distillation.student)
