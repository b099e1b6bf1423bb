"""Fit the teacher, or find it fitted."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kd import config
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
from kd.jobs._folder import FREE, export_run, flatten, open_run
from kd.models.classifier import Classifier, Ensemble, TeacherModel
from kd.parts import default_options
from kd.setup.build import distributed, needed_by
from kd.setup.data import Data, open_data
from kd.setup.teacher import load_teacher

log = logging.getLogger("kd")


def teach(settings: Config) -> list[Path]:
    """Fit the teachers of a configuration that have no checkpoint, or find them fitted; return their folders.

    Raises:
        ConfigError: the config does not say how to fit one.
    """
    if not settings.teacher.fit.epochs:
        raise ConfigError("teacher.fit.epochs", "is 0", "At least 1", "Say for how long to fit the teacher")
    with distributed(settings.backend) as backend:
        data = open_data(settings.data, settings.run.folder, backend)
        unfitted = [one for _, one in split_teachers(settings.teacher) if not one.checkpoint]
        return [fit_teacher(teacher_config(settings, one), data, backend) for one in unfitted]


def obtain_teacher(settings: Config, data: Data, backend: Backend) -> TeacherModel | None:
    """Load the teacher, or all of several; fit first where the config says so and there is no checkpoint."""
    section = settings.teacher
    if not section.model:
        return None
    if section.shard or section.pipeline:
        backend.check_divided(section.pipeline)  # before minutes are spent on fitting one
    features = "pooled" in needed_by(settings.losses)
    on_meta = section.shard and backend.rank != 0 and settings.student.init != "teacher"
    models = []
    for where, alone in split_teachers(section):
        folder = ""
        if section.fit.epochs and not alone.checkpoint:
            folder = str(fit_teacher(teacher_config(settings, alone), data, backend))
        size = settings.data.image_size
        models.append(load_teacher(alone, data.train.classes, size, features, folder, on_meta, where))
    return merge_teachers(section, models)


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


def fit_teacher(plan: Config, data: Data, backend: Backend) -> Path:
    """Fit a teacher on the labels and keep its best epoch; one fitted before from the same content is reused.

    Args:
        plan: what `teacher_config` returned.
        data: both splits.
        backend: set up.

    Returns:
        An export folder, named by a hash of everything that the weights depend on.
    """
    values = [v for k, v in sorted(flatten(config.to_dict(plan)).items()) if not k.startswith(FREE)]
    key = hashlib.sha256((json.dumps(values, default=str) + data.fingerprint).encode()).hexdigest()[:12]
    name = f"{Path(plan.student.model).name.replace(':', '_')}-{key}"
    plan = replace(plan, run=replace(plan.run, name=name))
    path = Path(plan.run.folder) / name
    target = path / "export"
    if (target / "model.safetensors").is_file():
        if backend.rank == 0:
            log.info("teacher: reusing '%s'", target)
        return target
    with open_run(path, plan, backend.rank) as folder:
        distill(plan, data, backend, None, folder, "teacher")
        if backend.rank == 0:
            export_run(folder, plan, target, data.train.classes)
        backend.barrier()
    return target


def teacher_config(settings: Config, section: TeacherSection) -> Config:
    """Return the run that fits a teacher: the teacher as a student of the labels."""
    fit = section.fit
    ce = default_options("losses", "ce", label_smoothing=fit.label_smoothing)
    return Config(
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
