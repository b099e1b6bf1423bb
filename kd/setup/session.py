"""What a run's set-up works with, and what it chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kd.contracts import Backend
from kd.setup.data import BatchSplit, Data


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
