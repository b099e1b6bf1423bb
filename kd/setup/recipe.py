"""A run's recipe: its configuration with numbers in place of `auto`, and what follows
from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kd import config as configuration
from kd.config.data_section import Progressive
from kd.config.reads import Reads, build_task, reads
from kd.config.schema import (
    BackendSection,
    Config,
    DataSection,
    LossSection,
    OptimizerSection,
    RunSection,
    SifterSection,
    StudentSection,
    TaskSection,
    TeacherSection,
)
from kd.config.tuning import FROM_PRETRAINED, FROM_SCRATCH, Fit
from kd.core.evaluation import Task
from kd.core.every import Intervals
from kd.engine.run import RunLength
from kd.files.run_dir import BASELINE, RunDir
from kd.parts.registry import default_options
from kd.setup.auto import completed
from kd.setup.data_plan import DataPlan, plan_of

SMOOTHING = (
    Fit().label_smoothing
)  # loss on labels alone, the default for fitting a teacher


@dataclass(frozen=True, slots=True)
class Record:
    """A configuration as recorded in the run folder; no computation reads it."""

    name: str
    path: Path  # the run folder
    keep: int  # checkpoints beside the chosen one
    trackers: tuple[str, ...]
    # the configuration with every key as YAML; texts from the environment are
    # references
    yaml: str
    keys: Mapping[
        str, Any
    ]  # as {"section.key": value}, with the values of references, for comparison
    shown: Mapping[str, Any]  # the same with the references, for display


@dataclass(frozen=True)
class Recipe:
    """The training of one network: a configuration with numbers in place of `auto`, and
    what follows from it.
    """

    config: Config
    path: Path  # the run folder
    # config path of the trained network's section, for messages; in a fit the teacher's
    config_path: str = "student"

    @property
    def teacher(self) -> TeacherSection:
        return self.config.teacher

    @property
    def student(self) -> StudentSection:
        return self.config.student

    @property
    def losses(self) -> tuple[LossSection, ...]:
        return self.config.losses

    @property
    def backend(self) -> BackendSection:
        return self.config.backend

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def name(self) -> str:
        return self.config.run.name

    @cached_property
    def data(self) -> DataPlan:
        return plan_of(self.config)

    @cached_property
    def task(self) -> Task:
        return build_task(self.config.task)

    @cached_property
    def read(self) -> Reads:
        return reads(self.losses)

    @cached_property
    def members(self) -> Mapping[str, TeacherSection]:
        """The single teachers by config path; empty without a teacher."""
        return split_teachers(self.teacher)

    @cached_property
    def fits(self) -> Mapping[str, Config]:
        """The runs that fit teachers without a checkpoint, by the same path."""
        return {
            config_path: teacher_fit(self.config, one)
            for config_path, one in self.members.items()
            if one.fitted
        }

    @cached_property
    def length(self) -> RunLength:
        run, data = self.config.run, self.data
        until = data.progressive.until
        return RunLength(
            int(run.epochs),
            run.steps,
            data.batch_size,
            data.views,
            run.every,
            run.patience,
            until,
        )

    @cached_property
    def baseline(self) -> Config | None:
        """The requested baseline on labels alone; see `as_long`."""
        return labels_only(self.config) if self.config.run.baseline else None

    @cached_property
    def record(self) -> Record:
        run = self.config.run
        return Record(
            name=run.name,
            path=self.path,
            keep=run.keep,
            trackers=run.trackers,
            yaml=configuration.dump(self.config),
            keys=flatten(configuration.to_dict(self.config, values=True)),
            shown=flatten(configuration.to_dict(self.config)),
        )

    def with_(self, **sections: Any) -> Recipe:
        """Return the recipe with other sections."""
        return replace(self, config=replace(self.config, **sections))


def resolve(config: Config, path: Path | None = None) -> Recipe:
    """Resolve a configuration; `path`: the run folder, if it is not
    `run.folder`/`run.name`.
    """
    config = completed(config)
    return Recipe(config, path or Path(config.run.folder) / config.run.name)


# -------------------------------------------------------------------------------- runs
# derived from another


def teacher_fit(config: Config, section: TeacherSection) -> Config:
    """Return the run that fits a teacher: it trains the teacher as a student on
    labels.
    """
    fit, task, rate = (
        section.fit,
        config.task,
        FROM_PRETRAINED if section.pretrained else FROM_SCRATCH,
    )
    batch_size = fit.batch_size or config.data.batch_size
    if not build_task(task).logits:  # training on labels needs a classifier
        task = TaskSection(
            kind="single_label", options=default_options("tasks", "single_label")
        )
    return Config(
        run=RunSection(
            folder=fit.folder,
            seed=fit.seed,
            epochs=max(1, int(fit.epochs)),  # the length may be given in steps only
            steps=fit.steps,
            every=Intervals(log=config.run.every.log, evaluate=fit.evaluate),
            keep=1,
            patience=fit.patience,
        ),
        # Fresh full-size views each epoch, independent of the student's: its keys must
        # not change the teacher. Evaluating 500 images at once, fine for a student at
        # 32 px, took 3 GB for an EfficientNet-Lite0 at 128 px.
        data=replace(
            in_fresh_views(config.data),
            batch_size=batch_size,
            eval_batch=min(
                config.data.eval_batch, config.data.micro_batch or batch_size
            ),
            progressive=Progressive(),
            augment=fit.augmented(config.data.augment),
        ),
        task=task,
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
        # keeps its old value: it is part of the hash in `fit_folders`
        teacher=TeacherSection(
            fit=Fit(lr=FROM_SCRATCH), options=default_options("networks", "timm")
        ),
        losses=on_labels(config.task, label_smoothing=fit.label_smoothing),
        sifter=SifterSection(options=default_options("sifters", "none")),
        optimizer=OptimizerSection(
            lr=fit.lr or rate,
            weight_decay=fit.weight_decay,
            warmup_ratio=fit.warmup_ratio,
        ),
        backend=config.backend,
    )


def in_fresh_views(data: DataSection) -> DataSection:
    """Return the same images with a fresh view each epoch, without stored views."""
    return replace(data, views=0, store="none" if data.store == "views" else data.store)


def labels_only(config: Config) -> Config:
    """Return the baseline on labels alone: same student and batches, fresh views, label
    smoothing.
    """
    run = replace(
        config.run, baseline=False, baseline_steps=0, steps=config.run.baseline_steps
    )
    return replace(
        config,
        data=in_fresh_views(config.data),
        run=replace(run, patience=0 if run.steps else run.patience),
        teacher=TeacherSection(options=default_options("networks", "timm")),
        losses=on_labels(config.task, label_smoothing=SMOOTHING),
        sifter=SifterSection(options=default_options("sifters", "none")),
    )


def as_long(alone: Config, folder: RunDir) -> Recipe:
    """Return the baseline of a finished run: with `run.baseline_steps`, else with the
    length in the run's manifest.

    It is evaluated as often as the run: each further evaluation is another chance of a
    best score.
    """
    given, times = alone.run.steps, max(1, len(folder.metrics("val")))
    length = {
        "steps": given or max((row["step"] for row in folder.rows()), default=1)
    }  # of a run of an earlier kd
    length = length if given else folder.manifest().get(BASELINE, length)
    every = replace(alone.run.every, evaluate=-(-length["steps"] // times))
    path = folder.path / (f"{BASELINE}_{given}" if given else BASELINE)
    return resolve(replace(alone, run=replace(alone.run, every=every, **length)), path)


def on_labels(section: TaskSection, **options: Any) -> tuple[LossSection, ...]:
    """Return the loss for training on labels alone."""
    kind = build_task(section).label_loss
    return (LossSection(kind=kind, options=default_options("losses", kind, **options)),)


def split_teachers(section: TeacherSection) -> dict[str, TeacherSection]:
    """Return each teacher by its config path; a repeated entry gets another seed."""
    found: dict[str, TeacherSection] = {}
    for i, one in enumerate([section, *section.also] if section.model else []):
        config_path = f"teacher.also[{i - 1}]" if i else "teacher"
        own = {
            key: getattr(one, key)
            for key in ("kind", "model", "args", "checkpoint", "weights", "options")
        }
        alike = sum(
            all(getattr(other, key) == own[key] for key in own)
            for other in found.values()
        )
        fit = replace(section.fit, seed=section.fit.seed + alike)
        found[config_path] = replace(
            section, **own, also=(), fit=fit, license=one.license
        )
    return found


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested sections as {"section.key": value}."""
    if isinstance(value, dict) and value:
        pairs = [
            (f"{prefix}.{key}" if prefix else key, item) for key, item in value.items()
        ]
    elif isinstance(value, list) and value:
        pairs = [(f"{prefix}.{i}", item) for i, item in enumerate(value)]
    else:
        return {prefix: value}
    return {
        name: leaf for key, item in pairs for name, leaf in flatten(item, key).items()
    }


# Keys that may differ on resume: they change display and speed, not results. The data's
# folder is one: the content is compared by its fingerprint.
FREE = (
    "run.name",
    "run.folder",
    "run.keep",
    "run.trackers",
    "run.every.",
    # and its length: the student is equal, and each baseline has its own folder
    "run.baseline",
    "data.root",
    "data.copies",
    "data.exclude",
    "data.group",
    "data.test",  # test_split etc.: no weight depends on them
    "data.workers",
    "data.loader",
    "data.deadline",
    "data.eval_batch",
    "data.max_skipped",  # it can only stop a run
    "data.license",
    "teacher.license",
    "teacher.shard",
    "teacher.pipeline",
    "optimizer.on_nonfinite",  # it has no effect before the first such step
    "backend.timeout_seconds",
    "profile.",
    "teacher.cache.path",
    "price.",
    "teacher.cache.max_gb",  # it can only refuse a run
)


def is_free(key: str, *more: str) -> bool:
    """Return whether a key is one of `FREE`, of `more`, or the licence of a further
    teacher.
    """
    return key.startswith((*FREE, *more)) or (
        key.startswith("teacher.also") and key.endswith(".license")
    )


def fit_folders(recipe: Recipe, fingerprint: str) -> dict[str, tuple[Recipe, Path]]:
    """Return for each teacher to fit its recipe, with run folder, and its export
    folder.
    """
    found = {}
    for config_path, fit in recipe.fits.items():
        # The evaluation interval is included, because it decides which weights are kept
        # as the best.
        keys = flatten(configuration.to_dict(fit, values=True))
        # `module:function` names the kind; a fit has full-size views and no teacher
        never = "student.kind", "data.progressive.", "teacher.fit.augment"
        counts = {
            key: value
            for key, value in keys.items()
            if not is_free(key, *never) or key == "run.every.evaluate"
        }
        if counts["data.store"] == "disk":  # `kd-sweep` sets a store; pixels are equal
            counts["data.store"] = "ram"
        content = json.dumps(
            {"keys": counts, "data": fingerprint}, sort_keys=True, default=str
        )
        key = hashlib.sha256(content.encode()).hexdigest()[:12]
        name = f"{Path(fit.student.model).name.replace(':', '_')}-{key}"
        own = replace(
            resolve(replace(fit, run=replace(fit.run, name=name))),
            config_path=config_path,
        )
        found[config_path] = own, own.path / "export"
    return found


def is_fitted(target: Path) -> bool:
    """Return whether a teacher was exported to a folder."""
    return (target / "model.safetensors").is_file()
