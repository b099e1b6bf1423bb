"""Inputs of the rules, and their findings.

The inputs are the rows of a run and facts of its configuration and machine.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kd.core.types import Loading
from kd.engine.monitor.timeline import APART, summed

Row = Mapping[str, Any]

MIN_SAMPLES = 5  # fewest samples of the machine for a mean load


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts of a run that are not in its rows."""

    device: str = "cpu"
    cores: int = 1  # cores of the machine, for all its ranks
    local_ranks: int = 1
    workers: int = 0  # data workers per rank
    store: str = "none"
    epochs: float = 2.0
    live: bool = False  # a teacher runs in each step, and nothing keeps its outputs
    # the configuration asks for it where `auto` would choose bfloat16
    float32: Callable[[], bool] = lambda: False
    evaluate: int = 0  # steps between two evaluations; 0: unknown
    checkpoint: int = 0
    epoch: int = 0  # steps of an epoch; 0: unknown

    @property
    def share(self) -> int:
        return max(1, self.cores // self.local_ranks)

    @property
    def most_workers(self) -> int:
        """Return the most data workers that leave a core for the step."""
        return 0 if self.device == "cpu" and self.share <= 2 else max(1, self.share - 1)

    @property
    def new_store(self) -> str:
        """Return a `data.store` that all ranks of a host can share, or "" for none."""
        if self.store != "none" or self.epochs < 2:  # set, or each image is read once
            return ""
        return "ram" if self.local_ranks == 1 else "disk"


@dataclass(frozen=True, slots=True)
class Finding:
    """One entry of findings.json."""

    rule: str
    severity: str  # "warning" if at least a fifth of the time may be saved, else "info"
    evidence: str
    threshold: str
    advice: str
    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class Evidence:
    """The rows of a run."""

    timelines: Mapping[int, Sequence[Row]]  # by rank
    samples: Sequence[Row]  # of rank 0's host
    facts: Facts = Facts()

    def starts(self, rank: int = 0) -> list[list[Row]]:
        """Return the steady rows of each start of the run."""
        # the rows of a start begin with its set-up
        starts: list[list[Row]] = [[]]
        for row in self.timelines.get(rank, ()):
            if row["kind"] == "setup":
                starts.append([])
            elif row["kind"] == "steady" and row["steps"]:
                starts[-1].append(row)
        return starts

    def steady(self, rank: int = 0) -> list[Row]:
        return [row for rows in self.starts(rank) for row in rows]

    def steps(self, rank: int = 0) -> int:
        return sum(row["steps"] for row in self.steady(rank))

    def latest_steps(self) -> list[dict[str, float]]:
        """Return each steady step of rank 0's last start, ms by span."""
        rows = next((rows for rows in reversed(self.starts()) if rows), [])
        return [
            {name: values[i] for name, values in row["each_ms"].items()}
            for row in rows
            if "each_ms" in row and row["clock"] != "tracing"
            for i in range(row["steps"])
        ]

    def step(self, rank: int = 0) -> dict[str, float]:
        rows = self.steady(rank)
        total = summed([row.get("device_ms", row["ms"]) for row in rows])
        count = max(1, self.steps(rank))
        return {
            name: value / count for name, value in total.items() if name not in APART
        }

    def loading(self, rank: int = 0) -> Loading:
        """Return the loading time of a steady step, ms; zeros if it was not counted."""
        total = summed([row.get("loading_ms", {}) for row in self.steady(rank)])
        count = max(1, self.steps(rank))
        return Loading(**{name: value / count for name, value in total.items()})

    def during(self) -> list[list[Row]]:
        """Return the samples in the steady steps of each start."""
        # between starts the machine does other work
        groups = []
        for rows in self.starts():
            if rows:
                begin = rows[0]["time"] - rows[0]["wall_ms"] / 1000
                end = rows[-1]["time"]
                groups.append(
                    [row for row in self.samples if begin <= row["time"] <= end]
                )
        return groups

    def mean(self, read: Callable[[Row], float]) -> float | None:
        """Return the mean of a value over these samples; None if there are too few."""
        values = [read(sample) for samples in self.during() for sample in samples]
        return statistics.mean(values) if len(values) >= MIN_SAMPLES else None

    def load(self) -> float | None:
        """Return the mean load of the machine's cores, percent."""
        return self.mean(lambda sample: statistics.mean(sample["cpu"] or [0.0]))
