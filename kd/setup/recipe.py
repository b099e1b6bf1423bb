"""A configuration, resolved once: what is trained, where it takes place, and what its start chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kd import config as configuration
from kd.config.schema import (
    BackendSection,
    Config,
    DataSection,
    LossSection,
    OptimizerSection,
    RunSection,
    SifterSection,
    StudentSection,
    TeacherSection,
)
from kd.config.validate import needs
from kd.contracts import Backend
from kd.setup.data import BatchSplit, Data


@dataclass(frozen=True, slots=True, kw_only=True)
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
    student: StudentSection
    losses: tuple[LossSection, ...]
    needs: frozenset[str]
    """What the losses need: "teacher", "hard_labels", names of features such as "pooled"."""
    sifter: SifterSection
    optimizer: OptimizerSection
    backend: BackendSection
    yaml: str
    """The configuration, every key written out; the run folder keeps it."""
    keys: Mapping[str, Any]
    """The same as {"section.key": value}, to compare and to show."""

    @property
    def features(self) -> bool:
        """Whether a loss needs pooled features."""
        return "pooled" in self.needs


def resolve(config: Config) -> Recipe:
    """Resolve a configuration."""
    return Recipe(
        name=config.run.name,
        path=Path(config.run.folder) / config.run.name,
        seed=config.run.seed,
        run=config.run,
        data=config.data,
        views=config.data.views or config.teacher.cache.views,
        teacher=config.teacher,
        student=config.student,
        losses=config.losses,
        needs=frozenset().union(*needs(config.losses)),
        sifter=config.sifter,
        optimizer=config.optimizer,
        backend=config.backend,
        yaml=configuration.dump(config),
        keys=flatten(configuration.to_dict(config)),
    )


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested sections as {"section.key": value}."""
    if isinstance(value, dict) and value:
        pairs = [(f"{prefix}.{key}" if prefix else key, item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        pairs = [(f"{prefix}.{i}", item) for i, item in enumerate(value)]
    else:
        return {prefix: value}
    return {name: leaf for key, item in pairs for name, leaf in flatten(item, key).items()}


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
