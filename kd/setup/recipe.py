"""A run's recipe.

It is the configuration with numbers in place of `auto`, and what follows from it.
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

# loss on labels alone, the default for fitting a teacher
SMOOTHING = Fit().label_smoothing


@dataclass(frozen=True, slots=True)
class Record:
    """Hold a configuration as recorded in the run folder.

    No computation reads it.
    """

    name: str
    path: Path  # the run folder
    keep: int  # checkpoints beside the chosen one
    trackers: tuple[str, ...]
    # the configuration with every key as YAML; texts from the environment are
    # references
    yaml: str
    # as {"section.key": value}, with the values of references, for comparison
    keys: Mapping[str, Any]
    display_keys: Mapping[str, Any]  # the same with the references, for display


@dataclass(frozen=True)
class Recipe:
    """Describe the training of one network.

    It has a configuration with numbers in place of `auto`, and what follows from it.
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
        """Return the single teachers by config path; {} without a teacher."""
        return split_teachers(self.teacher)

    @cached_property
    def fits(self) -> Mapping[str, Config]:
        """Return the runs that fit teachers without a checkpoint, by the same path."""
        return {
            config_path: teacher_fit(self.config, section)
            for config_path, section in self.members.items()
            if section.fitted
        }

    @cached_property
    def length(self) -> RunLength:
        run = self.config.run
        data = self.data
        return RunLength(
            int(run.epochs),
            run.steps,
            data.batch_size,
            data.views,
            run.every,
            run.patience,
            data.progressive.until,
        )

    @property
    def lr(self) -> float:
        """Return the peak learning rate at this batch size."""
        return self.config.optimizer.scaled_lr(self.data.batch_size)

    @cached_property
    def baseline(self) -> Config | None:
        """Return the requested baseline on labels alone.

        See `match_baseline_length`.
        """
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
            display_keys=flatten(configuration.to_dict(self.config)),
        )

    def with_(self, **sections: Any) -> Recipe:
        """Return the recipe with other sections."""
        return replace(self, config=replace(self.config, **sections))


def resolve(config: Config, path: Path | None = None) -> Recipe:
    """Resolve a configuration.

    `path` is the run folder, if it is not `run.folder`/`run.name`.
    """
    config = completed(config)
    return Recipe(config, path or Path(config.run.folder) / config.run.name)


def teacher_fit(config: Config, section: TeacherSection) -> Config:
    """Return the run that fits a teacher by training it on labels as a student."""
    fit = section.fit
    task = config.task
    rate = FROM_PRETRAINED if section.pretrained else FROM_SCRATCH
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
    """Return the baseline on labels alone.

    It has the same student and batches, fresh views and label smoothing.
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


def match_baseline_length(alone: Config, folder: RunDir) -> Recipe:
    """Return the baseline of a finished run, with a length of its own or the run's.

    The first is `run.baseline_steps`, the second is in the run's manifest.

    It is evaluated as often as the run: each further evaluation is another chance of a
    best score.
    """
    steps = alone.run.steps
    path = folder.path / (f"{BASELINE}_{steps}" if steps else BASELINE)
    length = {"steps": steps}
    if not steps:
        # of a run of an earlier kd
        last = max((row["step"] for row in folder.rows()), default=1)
        length = folder.manifest().get(BASELINE, {"steps": last})
    evaluations = max(1, len(folder.metrics("val")))
    every = replace(alone.run.every, evaluate=-(-length["steps"] // evaluations))
    return resolve(replace(alone, run=replace(alone.run, every=every, **length)), path)


def on_labels(section: TaskSection, **options: Any) -> tuple[LossSection, ...]:
    """Return the loss for training on labels alone."""
    kind = build_task(section).label_loss
    return (LossSection(kind=kind, options=default_options("losses", kind, **options)),)


def split_teachers(section: TeacherSection) -> dict[str, TeacherSection]:
    """Return each teacher by its config path; a repeated entry gets another seed."""
    if not section.model:
        return {}
    teachers: dict[str, TeacherSection] = {}
    for i, entry in enumerate([section, *section.also]):
        values = {
            key: getattr(entry, key)
            for key in ("kind", "model", "args", "checkpoint", "weights", "options")
        }
        repeats = sum(
            all(getattr(teacher, key) == values[key] for key in values)
            for teacher in teachers.values()
        )
        fit = replace(section.fit, seed=section.fit.seed + repeats)
        config_path = f"teacher.also[{i - 1}]" if i else "teacher"
        teachers[config_path] = replace(
            section, **values, also=(), fit=fit, license=entry.license
        )
    return teachers


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
RESUME_MUTABLE = (
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


def is_resume_mutable(key: str, *prefixes: str) -> bool:
    """Return whether a key is in `RESUME_MUTABLE` or begins with one of `prefixes`.

    The licence of a further teacher is mutable too.
    """
    if key.startswith("teacher.also") and key.endswith(".license"):
        return True
    return key.startswith((*RESUME_MUTABLE, *prefixes))


def fit_folders(recipe: Recipe, fingerprint: str) -> dict[str, tuple[Recipe, Path]]:
    """Return the recipe and the export folder of each teacher to fit.

    The recipe has its run folder.
    """
    folders = {}
    for config_path, fit in recipe.fits.items():
        # The evaluation interval is included, because it decides which weights are kept
        # as the best.
        keys = flatten(configuration.to_dict(fit, values=True))
        # `module:function` names the kind; a fit has full-size views, no teacher, and
        # the rate of `teacher.fit.lr`
        unread = (
            "student.kind",
            "data.progressive.",
            "teacher.fit.augment",
            "optimizer.lr_",
        )
        identity = {
            key: value
            for key, value in keys.items()
            if not is_resume_mutable(key, *unread) or key == "run.every.evaluate"
        }
        # `kd-sweep` sets a store; pixels are equal
        if identity["data.store"] == "disk":
            identity["data.store"] = "ram"
        content = json.dumps(
            {"keys": identity, "data": fingerprint}, sort_keys=True, default=str
        )
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        name = f"{Path(fit.student.model).name.replace(':', '_')}-{digest}"
        fit_recipe = resolve(replace(fit, run=replace(fit.run, name=name)))
        fit_recipe = replace(fit_recipe, config_path=config_path)
        folders[config_path] = fit_recipe, fit_recipe.path / "export"
    return folders


def is_fitted(folder: Path) -> bool:
    """Return whether a teacher was exported to a folder."""
    return (folder / "model.safetensors").is_file()
