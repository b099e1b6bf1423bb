"""Fit the teacher, or find it fitted."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kd.config import Config
from kd.config.schema import (
    Intervals,
    LossSection,
    OptimizerSection,
    RunSection,
    SifterSection,
    StudentSection,
    TeacherSection,
)
from kd.contracts import Backend
from kd.errors import ConfigError
from kd.jobs._distill import distill
from kd.jobs._folder import FREE, export_run, open_run
from kd.models.classifier import Classifier, Ensemble, TeacherModel
from kd.parts import default_options
from kd.setup.build import distributed
from kd.setup.data import Data, open_data
from kd.setup.recipe import Recipe, resolve
from kd.setup.teacher import load_teacher

log = logging.getLogger("kd")


def teach(settings: Config) -> list[Path]:
    """Fit the teachers of a configuration that have no checkpoint, or find them fitted; return their folders.

    Raises:
        ConfigError: the config does not say how to fit one.
    """
    if not settings.teacher.fit.epochs:
        raise ConfigError("teacher.fit.epochs", "is 0", "At least 1", "Say for how long to fit the teacher")
    recipe = resolve(settings)
    with distributed(recipe.backend) as backend:
        data = open_data(recipe.data, recipe.run.folder, backend)
        return [fit_teacher(one, data, backend) for one in teacher_recipes(settings).values()]


def obtain_teacher(recipe: Recipe, fits: Mapping[str, Recipe], data: Data, backend: Backend) -> TeacherModel | None:
    """Load the teacher, or all of several; fit first where there is no checkpoint.

    Args:
        recipe: of the student.
        fits: what `teacher_recipes` returned.
        data: both splits.
        backend: set up.
    """
    section = recipe.teacher
    if not section.model:
        return None
    if section.shard or section.pipeline:
        backend.check_divided(section.pipeline)  # before minutes are spent on fitting one
    on_meta = section.shard and backend.rank != 0 and recipe.student.init != "teacher"
    models, classes, size = [], data.train.classes, recipe.data.image_size
    for where, alone in split_teachers(section):
        folder = str(fit_teacher(fits[where], data, backend)) if where in fits else ""
        models.append(load_teacher(alone, classes, size, recipe.features, folder, on_meta, where))
    return merge_teachers(section, models)


def teacher_recipes(settings: Config) -> dict[str, Recipe]:
    """Return the fits of the teachers that have no checkpoint, by config path; none where the config fits none."""
    if not settings.teacher.model or not settings.teacher.fit.epochs:
        return {}
    found = split_teachers(settings.teacher)
    return {where: teacher_recipe(settings, one) for where, one in found if not one.checkpoint}


def split_teachers(section: TeacherSection) -> list[tuple[str, TeacherSection]]:
    """Return for each teacher its config path and a section in which it is the only one."""
    found = []
    for i, one in enumerate([section, *section.also]):
        alone = replace(section, model=one.model, args=one.args, checkpoint=one.checkpoint, also=())
        found.append(("teacher" if i == 0 else f"teacher.also[{i - 1}]", alone))
    return found


def merge_teachers(section: TeacherSection, models: Sequence[Classifier]) -> TeacherModel:
    """Return the one teacher, or several as one."""
    weights = [1.0, *(member.weight for member in section.also)]
    return models[0] if len(models) == 1 else Ensemble(models, weights)


def fit_teacher(recipe: Recipe, data: Data, backend: Backend) -> Path:
    """Fit a teacher on the labels and keep its best epoch; one fitted before from the same content is reused.

    Args:
        recipe: the teacher as a student of the labels.
        data: both splits.
        backend: set up.

    Returns:
        An export folder, named by a hash of everything that the weights depend on.
    """
    values = [value for key, value in sorted(recipe.keys.items()) if not key.startswith(FREE)]
    key = hashlib.sha256((json.dumps(values, default=str) + data.fingerprint).encode()).hexdigest()[:12]
    name = f"{Path(recipe.student.model).name.replace(':', '_')}-{key}"
    recipe = replace(recipe, name=name, path=recipe.path / name)
    target = recipe.path / "export"
    if (target / "model.safetensors").is_file():
        if backend.rank == 0:
            log.info("teacher: reusing '%s'", target)
        return target
    with open_run(recipe, backend.rank) as folder:
        distill(recipe, data, backend, None, folder, "teacher")
        if backend.rank == 0:
            export_run(folder, recipe, target, data.train.classes)
        backend.barrier()
    return target


def teacher_recipe(settings: Config, section: TeacherSection) -> Recipe:
    """Return the run that fits a teacher: the teacher as a student of the labels."""
    fit = section.fit
    ce = default_options("losses", "ce", label_smoothing=fit.label_smoothing)
    plan = Config(
        run=RunSection(
            folder=fit.folder,
            seed=settings.run.seed,
            epochs=fit.epochs,
            steps=fit.steps,
            every=Intervals(log=settings.run.every.log, evaluate=fit.evaluate),
            keep=1,
        ),
        # Fresh views each epoch, whatever the student will see: `data.views` must not choose another teacher.
        data=replace(settings.data, batch_size=fit.batch_size or settings.data.batch_size, views=0),
        student=StudentSection(
            model=section.model,
            args=section.args,
            init="pretrained" if section.pretrained else "scratch",
            attention=section.attention,
        ),
        teacher=TeacherSection(options=default_options("teachers", "timm")),
        losses=(LossSection(kind="ce", options=ce),),
        sifter=SifterSection(options=default_options("sifters", "none")),
        optimizer=OptimizerSection(lr=fit.lr, weight_decay=fit.weight_decay, warmup=fit.warmup),
        backend=settings.backend,
    )
    return resolve(plan)
