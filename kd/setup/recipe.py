"""Recipe: the resolved configuration, a part for each floor."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kd import config as configuration
from kd.config.reads import build_task, reads
from kd.config.schema import (
    BackendSection,
    Config,
    DataSection,
    LossSection,
    OptimizerSection,
    PriceSection,
    Progressive,
    RunSection,
    SifterSection,
    StudentSection,
    TaskSection,
    TeacherSection,
)
from kd.config.tuning import FROM_PRETRAINED, FROM_SCRATCH, Fit, Tuning
from kd.core.evaluation import Task
from kd.core.facts import Intervals
from kd.engine.run import RunLength
from kd.files.run_dir import BASELINE, RunDir
from kd.parts.registry import default_options
from kd.setup.data import DataPlan

SMOOTHING = Fit().label_smoothing  # of labels alone: what a teacher is fitted with, where nothing else is said


@dataclass(frozen=True, slots=True)
class Record:
    """The run folder's record of a configuration; no computation reads it."""

    name: str
    path: Path  # the run folder
    keep: int  # checkpoints beside the best one
    trackers: tuple[str, ...]
    yaml: str  # the configuration, every key written out; texts from the environment are references
    keys: Mapping[str, Any]  # the same as {"section.key": value}, with the values of references, to compare
    shown: Mapping[str, Any]  # the same with the references themselves, to show


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherPlan(TeacherSection):
    """The teachers, how they run, and which outputs are read. `kind`, `model` and their like are the first one's."""

    members: Mapping[str, TeacherSection]  # each teacher alone, by its config path; empty without a teacher
    fits: Mapping[str, Config]  # the runs that fit those that have no checkpoint, by the same path
    task: Task
    needed: bool  # whether a loss reads a teacher
    logits: bool  # whether a loss reads its logits; else it is loaded without a classifier
    features: tuple[str, ...]  # names of the features that a loss reads


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentPlan(StudentSection):
    """The student and what it minimizes."""

    losses: tuple[LossSection, ...]
    task: Task
    features: tuple[str, ...]  # names of the features that a loss reads
    seed: int
    where: str = "student"  # config path of its section, for messages; in a fit that of the teacher
    small: int = 0  # smaller images that it must take too, pixels; 0: none


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """How long a run is, how its weights move and which images it visits."""

    length: RunLength
    optimizer: OptimizerSection
    tuning: Tuning  # how single layers of the student learn
    sifter: SifterSection
    profile: tuple[int, ...]  # first and last step that are traced; empty: none
    seed: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """The training of one student. Rooms below the jobs take parts."""

    record: Record
    backend: BackendSection
    data: DataPlan
    teacher: TeacherPlan
    student: StudentPlan
    loop: LoopPlan
    price: PriceSection
    baseline: Config | None  # the requested run of the same student on labels alone; see `as_long`


def resolve(config: Config, path: Path | None = None) -> Recipe:
    """Resolve a configuration; `path` is the run folder, where it is not `run.folder`/`run.name`."""
    run, data, read, task = config.run, config.data, reads(config.losses), build_task(config.task)
    views = data.views or config.teacher.cache.views
    path, members = path or Path(run.folder) / run.name, split_teachers(config.teacher)
    keys = flatten(configuration.to_dict(config, values=True))
    record = Record(
        name=run.name,
        path=path,
        keep=run.keep,
        trackers=run.trackers,
        yaml=configuration.dump(config),
        keys=keys,
        shown=flatten(configuration.to_dict(config)),
    )
    teacher = TeacherPlan(
        **values_of(config.teacher),
        members=members,
        fits={w: teacher_fit(config, one) for w, one in members.items() if one.fitted},
        task=task,
        needed=read.teacher,
        logits=read.teacher_logits,
        features=read.features,
    )
    loop = LoopPlan(
        length=RunLength(
            run.epochs, run.steps, data.batch_size, views, run.every, run.patience, data.progressive.until
        ),
        optimizer=config.optimizer,
        tuning=config.student.tuning,
        sifter=config.sifter,
        profile=config.profile.steps,
        seed=run.seed,
    )
    return Recipe(
        record=record,
        backend=config.backend,
        data=DataPlan(**{**values_of(data), "views": views}, seed=run.seed, folder=run.folder),
        teacher=teacher,
        student=StudentPlan(
            **values_of(config.student),
            losses=config.losses,
            task=task,
            features=read.features,
            seed=run.seed,
            small=data.progressive.size,
        ),
        loop=loop,
        price=config.price,
        baseline=labels_only(config) if run.baseline else None,
    )


# -------------------------------------------------------------------------------- runs that follow from another


def teacher_fit(config: Config, section: TeacherSection) -> Config:
    """Return the run that fits a teacher: the teacher as a student of the labels."""
    fit, task, rate = section.fit, config.task, FROM_PRETRAINED if section.pretrained else FROM_SCRATCH
    batch_size = fit.batch_size or config.data.batch_size
    if not build_task(task).logits:  # a model that learns labels has a classifier
        task = TaskSection(kind="single_label", options=default_options("tasks", "single_label"))
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
        # Fresh whole views each epoch, whatever the student will see: no such key must choose another teacher. An
        # evaluation of 500 images, which a student of 32 px takes, took 3 GB for an EfficientNet-Lite0 at 128 px.
        data=replace(
            in_fresh_views(config.data),
            batch_size=batch_size,
            eval_batch=min(config.data.eval_batch, config.data.micro_batch or batch_size),
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
        # its own key of the rate is what it was before 0 meant one: a part of the hash of `fit_folders`
        teacher=TeacherSection(fit=Fit(lr=FROM_SCRATCH), options=default_options("networks", "timm")),
        losses=on_labels(config.task, label_smoothing=fit.label_smoothing),
        sifter=SifterSection(options=default_options("sifters", "none")),
        optimizer=OptimizerSection(lr=fit.lr or rate, weight_decay=fit.weight_decay, warmup_ratio=fit.warmup_ratio),
        backend=config.backend,
    )


def in_fresh_views(data: DataSection) -> DataSection:
    """Return the same images, in a new view each epoch: none that could be kept is shown twice."""
    return replace(data, views=0, store="none" if data.store == "views" else data.store)


def labels_only(config: Config) -> Config:
    """Return the run on labels alone at its best simple way: same student and batches, fresh views, label smoothing."""
    run = replace(config.run, baseline=False, baseline_steps=0, steps=config.run.baseline_steps)
    return replace(
        config,
        data=in_fresh_views(config.data),
        run=replace(run, patience=0 if run.steps else run.patience),
        teacher=TeacherSection(options=default_options("networks", "timm")),
        losses=on_labels(config.task, label_smoothing=SMOOTHING),
        sifter=SifterSection(options=default_options("sifters", "none")),
    )


def as_long(alone: Config, folder: RunDir) -> Recipe:
    """Return the baseline of a run that has ended: with `run.baseline_steps`, else with as many steps.

    It is evaluated as often as that run was: each more evaluation is one more chance for the best.
    """
    rows, given = folder.rows(), alone.run.steps
    steps = given or max((row["step"] for row in rows), default=1)
    times = max(1, len({row["step"] for row in rows if row["kind"] == "val"}))
    every = replace(alone.run.every, evaluate=-(-steps // times))
    path = folder.path / (f"{BASELINE}_{given}" if given else BASELINE)
    return resolve(replace(alone, run=replace(alone.run, steps=steps, every=every)), path)


def on_labels(section: TaskSection, **options: Any) -> tuple[LossSection, ...]:
    """Return the loss that learns labels alone."""
    kind = build_task(section).label_loss
    return (LossSection(kind=kind, options=default_options("losses", kind, **options)),)


def values_of(section: Any) -> dict[str, Any]:
    """Return the values of a section by their keys: a plan has them beside what it adds."""
    return {one.name: getattr(section, one.name) for one in fields(section)}


def split_teachers(section: TeacherSection) -> dict[str, TeacherSection]:
    """Return each teacher alone, by its config path; one that is written like an earlier one gets another seed."""
    found: dict[str, TeacherSection] = {}
    for i, one in enumerate([section, *section.also] if section.model else []):
        where = f"teacher.also[{i - 1}]" if i else "teacher"
        own = {key: getattr(one, key) for key in ("kind", "model", "args", "checkpoint", "weights", "options")}
        alike = sum(all(getattr(other, key) == own[key] for key in own) for other in found.values())
        fit = replace(section.fit, seed=section.fit.seed + alike)
        found[where] = replace(section, **own, also=(), fit=fit, license=one.license)
    return found


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested sections as {"section.key": value}."""
    if isinstance(value, dict) and value:
        pairs = [(f"{prefix}.{key}" if prefix else key, item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        pairs = [(f"{prefix}.{i}", item) for i, item in enumerate(value)]
    else:
        return {prefix: value}
    return {name: leaf for key, item in pairs for name, leaf in flatten(item, key).items()}


# Keys that may differ when a run is entered again: they change what is shown and how fast, not what is computed.
# Where the data lies is one of them: its content is compared by its fingerprint.
FREE = (
    "run.name",
    "run.folder",
    "run.keep",
    "run.trackers",
    "run.every.",
    "run.baseline",  # and its length: the student is the same, and each baseline has a folder of its own
    "data.root",
    "data.copies",
    "data.exclude",
    "data.test",  # test_split and its like: no weight depends on them
    "data.workers",
    "data.loader",
    "data.deadline",
    "data.eval_batch",
    "data.max_skipped",  # it can only end a run
    "data.license",
    "teacher.license",
    "teacher.shard",
    "teacher.pipeline",
    "optimizer.on_nonfinite",  # no bit of a run depends on it before the first such step
    "backend.timeout_seconds",
    "profile.",
    "teacher.cache.path",
    "price.",
    "teacher.cache.max_gb",  # it can only refuse
)


def is_free(key: str, *more: str) -> bool:
    """Return whether a key is one of `FREE`, of `more`, or the licence of a further teacher."""
    return key.startswith((*FREE, *more)) or (key.startswith("teacher.also") and key.endswith(".license"))


def fit_folders(plan: TeacherPlan, fingerprint: str) -> dict[str, tuple[Recipe, Path]]:
    """Return for each teacher to be fitted the recipe, with its run folder, and the export folder that it leaves."""
    found = {}
    for where, fit in plan.fits.items():
        # How often it is evaluated decides which weights are the best ones, and those are kept.
        keys = flatten(configuration.to_dict(fit, values=True))
        # `module:function` names the kind; a fit sees whole views, and has no teacher that would be augmented
        never = "student.kind", "data.progressive.", "teacher.fit.augment"
        counts = {key: value for key, value in keys.items() if not is_free(key, *never) or key == "run.every.evaluate"}
        if counts["data.store"] == "disk":  # `kd-sweep` needs one; it keeps the same pixels
            counts["data.store"] = "ram"
        content = json.dumps({"keys": counts, "data": fingerprint}, sort_keys=True, default=str)
        key = hashlib.sha256(content.encode()).hexdigest()[:12]
        name = f"{Path(fit.student.model).name.replace(':', '_')}-{key}"
        recipe = resolve(replace(fit, run=replace(fit.run, name=name)))
        recipe = replace(recipe, student=replace(recipe.student, where=where))
        found[where] = recipe, recipe.record.path / "export"
    return found


def is_fitted(target: Path) -> bool:
    """Return whether a teacher was exported there."""
    return (target / "model.safetensors").is_file()
