"""A configuration, resolved once: what is trained, where it takes place, and what its start chose."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from kd import config as configuration
from kd.config.schema import (
    BackendSection,
    Config,
    DataSection,
    Intervals,
    LossSection,
    OptimizerSection,
    PriceSection,
    ProfileSection,
    RunSection,
    SifterSection,
    StudentSection,
    TeacherSection,
)
from kd.config.validate import Reads, needs, reads
from kd.contracts import Backend
from kd.parts import default_options
from kd.references import Referenced
from kd.setup.data import BatchSplit, Data


@dataclass(frozen=True, init=False)
class Recipe:
    """The training of one student. Everything below the jobs takes this, or a part of it, and no configuration."""

    name: str
    path: Path
    """The run folder."""
    seed: int
    run: RunSection
    data: DataSection
    views: int
    """How many views an image has; 0: a fresh one every epoch."""
    teacher: TeacherSection
    teachers: Mapping[str, TeacherSection]
    """Each teacher alone, by its config path; empty without a teacher."""
    fits: Mapping[str, Config]
    """The runs that fit the teachers that have no checkpoint, by the same path."""
    student: StudentSection
    losses: tuple[LossSection, ...]
    needs: frozenset[str]
    """What the losses need: "teacher", "hard_labels", names of features such as "pooled"."""
    reads: Reads
    """Which outputs of both models the losses read."""
    sifter: SifterSection
    optimizer: OptimizerSection
    backend: BackendSection
    profile: ProfileSection
    price: PriceSection
    baseline: Config | None
    """The run of the same student on the labels alone, where one is asked for."""
    yaml: str
    """The configuration, every key written out; the run folder keeps it. Texts from the environment are references."""
    keys: Mapping[str, Any]
    """The same as {"section.key": value}, with the values of references, to compare."""
    shown: Mapping[str, Any]
    """The same with the references themselves, to show."""

    def __init__(self, config: Config, path: Path | None = None) -> None:
        """Resolve a configuration.

        Args:
            config: of the run.
            path: the run folder, where it is not `run.folder`/`run.name`.
        """
        run, teachers = config.run, split_teachers(config.teacher)
        keys = flatten(configuration.to_dict(config, values=True))
        hashed = hashes(keys).items()
        unfitted = [where for where, one in teachers.items() if one.fitted and not one.checkpoint]
        values = {
            **{section.name: getattr(config, section.name) for section in fields(config)},
            "name": run.name,
            "path": path or Path(run.folder) / run.name,
            "seed": run.seed,
            "views": config.data.views or config.teacher.cache.views,
            "teachers": teachers,
            "fits": {where: teacher_fit(config, teachers[where]) for where in unfitted},
            "needs": frozenset().union(*needs(config.losses)),
            "reads": reads(config.losses),
            "baseline": labels_only(config) if run.baseline else None,
            "yaml": configuration.dump(config) + "".join(f"# sha256 {each} {text}\n" for each, text in hashed),
            "keys": keys,
            "shown": flatten(configuration.to_dict(config)),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)


def split_teachers(section: TeacherSection) -> dict[str, TeacherSection]:
    """Return for each teacher, by its config path, a section in which it is the only one."""
    found = {}
    for i, one in enumerate([section, *section.also] if section.model else []):
        where = f"teacher.also[{i - 1}]" if i else "teacher"
        own = {key: getattr(one, key) for key in ("kind", "model", "args", "checkpoint", "options")}
        found[where] = replace(section, **own, also=())
    return found


def teacher_fit(config: Config, section: TeacherSection) -> Config:
    """Return the run that fits a teacher: the teacher as a student of the labels."""
    fit = section.fit
    return Config(
        run=RunSection(
            folder=fit.folder,
            seed=config.run.seed,
            epochs=fit.epochs,
            steps=fit.steps,
            every=Intervals(log=config.run.every.log, evaluate=fit.evaluate),
            keep=1,
            mirror=f"{config.run.mirror.rstrip('/')}/teachers" if config.run.mirror else "",
        ),
        # Fresh views each epoch, whatever the student will see: `data.views` must not choose another teacher.
        data=replace(config.data, batch_size=fit.batch_size or config.data.batch_size, views=0),
        student=StudentSection(
            model=section.model,
            args=section.args,
            init="pretrained" if section.pretrained else "scratch",
            attention=section.attention,
        ),
        teacher=TeacherSection(options=default_options("teachers", "timm")),
        losses=on_labels(config, label_smoothing=fit.label_smoothing),
        sifter=SifterSection(options=default_options("sifters", "none")),
        optimizer=OptimizerSection(lr=fit.lr, weight_decay=fit.weight_decay, warmup=fit.warmup),
        backend=config.backend,
    )


def labels_only(config: Config) -> Config:
    """Return the same run without its teacher: same student, steps, batches and views; the labels' loss only."""
    return replace(
        config,
        data=replace(config.data, views=config.data.views or config.teacher.cache.views),
        run=replace(config.run, baseline=False),
        teacher=TeacherSection(options=default_options("teachers", "timm")),
        losses=on_labels(config),
        sifter=SifterSection(options=default_options("sifters", "none")),
    )


def on_labels(config: Config, **options: Any) -> tuple[LossSection, ...]:
    """Return the loss that learns labels alone: of one label an image, or of several."""
    kind = "bce" if reads(config.losses).sigmoid else "ce"
    return (LossSection(kind=kind, options=default_options("losses", kind, **options)),)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested sections as {"section.key": value}."""
    if isinstance(value, dict) and value:
        pairs = [(f"{prefix}.{key}" if prefix else key, item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        pairs = [(f"{prefix}.{i}", item) for i, item in enumerate(value)]
    else:
        return {prefix: value}
    return {name: leaf for key, item in pairs for name, leaf in flatten(item, key).items()}


def hashes(keys: Mapping[str, Any]) -> dict[str, str]:
    """Return a short hash of each value from the environment, by key: a run folder holds the reference alone.

    Left out is where the data lies, and what opens it: the data's content is compared, and a token may change.
    """
    found = {key: value for key, value in keys.items() if isinstance(value, Referenced)}
    return {
        key: hashlib.sha256(f"{key}={value}".encode()).hexdigest()[:8]
        for key, value in found.items()
        if not key.startswith("data.") or key.startswith("data.augment.")
    }


@dataclass(frozen=True, slots=True)
class Session:
    """Where a run takes place: what every choice of its set-up is made with."""

    backend: Backend
    data: Data
    split: BatchSplit

    @property
    def image_size(self) -> int:
        """Side of an image, pixels."""
        return self.data.section.image_size


@dataclass(frozen=True, slots=True)
class Choices:
    """What a start decided by measuring; recorded, so that a resumed run computes the same bits."""

    teacher: str = ""
    """The teacher's execution mode, as text; "": not chosen yet."""
    student: str = ""
    threads: int = 0
    """Of torch on a CPU."""
    batch_size: int = 0
    """Images of a step, where `data.batch_size` is auto."""
    sifter: str = ""
    """The gate's decision: the sifter's kind, or "none"."""

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> Choices:
        """Read what `record` returned; entries of older versions that nothing depends on are dropped."""
        return cls(
            teacher=recorded.get("teacher", ""),
            student=recorded.get("student", ""),
            threads=int(recorded.get("threads", 0)),
            batch_size=int(recorded.get("batch_size", 0)),
            sifter=recorded.get("sifter", ""),
        )

    def record(self) -> dict[str, str]:
        """Return what the manifest holds: what was chosen, as text."""
        return {name: str(value) for name, value in asdict(self).items() if value}
