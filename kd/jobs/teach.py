"""Fit the teacher, or find it fitted."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from kd import build, config
from kd.artifacts.run_dir import RunDir
from kd.config import Config
from kd.contracts import Backend
from kd.errors import ConfigError
from kd.jobs._folder import FREE, enter, flatten
from kd.jobs._student import distil
from kd.jobs._teachers import each, together
from kd.jobs._world import prepared, world
from kd.jobs.export import export_run
from kd.models.ensemble import TeacherModel
from kd.parts import default_options
from kd.schema import Intervals, LossSection, OptimizerSection, RunSection, SifterSection, StudentSection


def teach(settings: Config) -> list[Path]:
    """Fit the teachers of a configuration that have no checkpoint, or find them fitted; return their folders.

    Raises:
        ConfigError: the config does not say how to fit one.
    """
    if not settings.teacher.fit.epochs:
        raise ConfigError("teacher.fit.epochs", "is 0", "At least 1", "Say for how long to fit the teacher")
    with world(settings) as backend:
        data = prepared(settings, backend)
        alone = [one for _, one in each(settings) if not one.teacher.checkpoint]
        return [fit_teacher(one, data, backend) for one in alone]


def obtain_teacher(settings: Config, data: build.Data, backend: Backend) -> TeacherModel | None:
    """Load the teacher, or all of several; fit first where the config says so and there is no checkpoint."""
    section = settings.teacher
    if not section.model:
        return None
    if section.shard or section.pipeline:
        backend.check_divided(section.pipeline)  # before minutes are spent on fitting one
    features = "features" in build.needs(settings)
    on_meta = section.shard and backend.rank != 0 and settings.student.init != "teacher"
    models = []
    for where, alone in each(settings):
        folder = ""
        if section.fit.epochs and not alone.teacher.checkpoint:
            folder = str(fit_teacher(alone, data, backend))
        models.append(build.teacher_model(alone, data.train.classes, features, folder, on_meta, where))
    return together(settings, models)


def fit_teacher(settings: Config, data: build.Data, backend: Backend) -> Path:
    """Fit the teacher on the labels and keep its best epoch; one fitted before from the same content is reused.

    Returns:
        An export folder, named by a hash of everything that the weights depend on.
    """
    plan = teacher_run(settings)
    text = json.dumps(
        [v for k, v in sorted(flatten(config.to_dict(plan)).items()) if not k.startswith(FREE)], default=str
    )
    key = hashlib.sha256((text + data.fingerprint).encode()).hexdigest()[:12]
    name = f"{Path(settings.teacher.model).name.replace(':', '_')}-{key}"
    plan = replace(plan, run=replace(plan.run, name=name))
    folder = RunDir(Path(plan.run.folder) / name, backend.rank, plan.run.keep)
    target = folder.path / "export"
    if (target / "model.safetensors").is_file():
        if backend.rank == 0:
            print(f"teacher: reusing '{target}'", flush=True)
        return target
    enter(folder, plan)
    try:
        distil(plan, data, backend, None, folder, "teacher")
        if backend.rank == 0:
            export_run(folder, plan, target, data.train.classes)
        backend.barrier()
    finally:
        folder.close()
    return target


def teacher_run(settings: Config) -> Config:
    """Return the run that fits the teacher: the teacher as a student of the labels."""
    section, fit = settings.teacher, settings.teacher.fit
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
        losses=(LossSection(kind="ce", options=ce),),
        sifter=SifterSection(options=default_options("sifters", "none")),
        optimizer=OptimizerSection(lr=fit.lr, weight_decay=fit.weight_decay, warmup=fit.warmup),
        backend=settings.backend,
    )
