"""Fit the teacher, or find it fitted."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from kd.config import Config
from kd.config.schema import TeacherSection
from kd.contracts import Backend
from kd.errors import ConfigError
from kd.jobs._distill import distill
from kd.jobs._folder import FREE, export_run
from kd.jobs._wait import open_fit
from kd.models.classifier import Classifier, Ensemble, TeacherModel
from kd.setup.build import distributed
from kd.setup.data import Data, open_data
from kd.setup.recipe import Recipe
from kd.setup.teacher import load_teacher

log = logging.getLogger("kd")


def teach(settings: Config) -> list[Path]:
    """Fit the teachers of a configuration that have no checkpoint, or find them fitted; return their folders.

    Raises:
        ConfigError: the config does not say how to fit one.
    """
    if not settings.teacher.fit.epochs:
        raise ConfigError("teacher.fit.epochs", "is 0", "At least 1", "Say for how long to fit the teacher")
    recipe = Recipe(settings)
    with distributed(recipe.backend) as backend:
        data = open_data(recipe.data, recipe.run.folder, backend)
        return [fit_teacher(fit, data, backend) for fit in recipe.fits.values()]


def obtain_teacher(recipe: Recipe, data: Data, backend: Backend) -> TeacherModel | None:
    """Load the teacher, or all of several; fit first where there is no checkpoint."""
    section = recipe.teacher
    if not section.model:
        return None
    if section.shard or section.pipeline:
        backend.check_divided(section.pipeline)  # before minutes are spent on fitting one
    on_meta = section.shard and backend.rank != 0
    models, classes, size = [], data.train.classes, recipe.data.image_size
    for where, alone in recipe.teachers.items():
        folder = str(fit_teacher(recipe.fits[where], data, backend)) if where in recipe.fits else ""
        models.append(load_teacher(alone, classes, size, recipe.features, folder, on_meta, where))
    return merge_teachers(section, models)


def merge_teachers(section: TeacherSection, models: Sequence[Classifier]) -> TeacherModel:
    """Return the one teacher, or several as one."""
    weights = [1.0, *(member.weight for member in section.also)]
    return models[0] if len(models) == 1 else Ensemble(models, weights)


def fit_key(fit: Recipe, fingerprint: str) -> str:
    """Return a hash of everything that the weights of a fitted teacher depend on.

    Args:
        fit: the teacher as a student of the labels.
        fingerprint: of the data.
    """
    # How often it is evaluated decides which weights are the best ones, and those are kept.
    counts = {key: value for key, value in fit.keys.items() if not key.startswith(FREE) or key == "run.every.evaluate"}
    content = json.dumps({"keys": counts, "data": fingerprint}, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def fit_teacher(plan: Config, data: Data, backend: Backend) -> Path:
    """Fit a teacher on the labels and keep its best epoch; one fitted before from the same content is reused.

    While another process fits it, wait for it.

    Args:
        plan: the teacher as a student of the labels.
        data: both splits.
        backend: set up.

    Returns:
        An export folder, named by a hash of everything that the weights depend on.
    """
    key = fit_key(Recipe(plan), data.fingerprint)
    name = f"{Path(plan.student.model).name.replace(':', '_')}-{key}"
    recipe = Recipe(replace(plan, run=replace(plan.run, name=name)))
    target = recipe.path / "export"
    with ExitStack() as stack:
        folder = open_fit(stack, recipe, target, backend)
        if folder is None:
            if backend.rank == 0:
                log.info("teacher: reusing '%s'", target)
            return target
        distill(recipe, data, backend, None, folder, "teacher")
        if backend.rank == 0:
            export_run(folder, recipe, target, data.train.classes)
        backend.barrier()
    return target
