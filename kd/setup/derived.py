"""Configurations that follow from another: the fit of a teacher, and the same student on labels alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kd.config.reads import build_task
from kd.config.schema import (
    Config,
    LossSection,
    OptimizerSection,
    RunSection,
    SifterSection,
    StudentSection,
    TaskSection,
    TeacherSection,
)
from kd.config.tuning import FROM_SCRATCH, Fit
from kd.core.facts import Intervals
from kd.parts.registry import default_options


def teacher_fit(config: Config, section: TeacherSection) -> Config:
    """Return the run that fits a teacher: the teacher as a student of the labels."""
    fit = section.fit
    return Config(
        run=RunSection(
            folder=fit.folder,
            seed=fit.seed,
            epochs=max(1, fit.epochs),  # steps alone may say how long it is
            steps=fit.steps,
            every=Intervals(log=config.run.every.log, evaluate=fit.evaluate),
            keep=1,
            patience=fit.patience,
        ),
        # Fresh views each epoch, whatever the student will see: `data.views` must not choose another teacher.
        data=replace(config.data, batch_size=fit.batch_size or config.data.batch_size, views=0),
        task=_task_of_labels(config.task),
        student=StudentSection(
            kind=section.kind,
            model=section.model,
            args=section.args,
            init="pretrained" if section.pretrained else "scratch",
            checkpoint=section.checkpoint,
            weights=section.weights,
            tuning=fit.tuning,
            attention=section.attention,
            options=section.options,
        ),
        # its own key of the rate is what it was before 0 meant one: a part of the hash of `fit_folders`
        teacher=TeacherSection(fit=Fit(lr=FROM_SCRATCH), options=default_options("networks", "timm")),
        losses=on_labels(config.task, label_smoothing=fit.label_smoothing),
        sifter=SifterSection(options=default_options("sifters", "none")),
        optimizer=OptimizerSection(lr=fit.rate(section.pretrained), weight_decay=fit.weight_decay, warmup=fit.warmup),
        backend=config.backend,
    )


def labels_only(config: Config) -> Config:
    """Return the same run without its teacher: same student, steps, batches and views; the labels' loss only."""
    return replace(
        config,
        data=replace(config.data, views=config.data.views or config.teacher.cache.views),
        run=replace(config.run, baseline=False),
        teacher=TeacherSection(options=default_options("networks", "timm")),
        losses=on_labels(config.task),
        sifter=SifterSection(options=default_options("sifters", "none")),
    )


def on_labels(section: TaskSection, **options: Any) -> tuple[LossSection, ...]:
    """Return the loss that learns labels alone."""
    kind = build_task(section).label_loss
    return (LossSection(kind=kind, options=default_options("losses", kind, **options)),)


def _task_of_labels(section: TaskSection) -> TaskSection:
    """Return the task of a model that learns labels: one with a classifier."""
    if build_task(section).logits:
        return section
    return TaskSection(kind="single_label", options=default_options("tasks", "single_label"))
