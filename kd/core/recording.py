"""The protocols of what shows and what stores the rows of a run."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from kd.core.types import State


class Logger(Protocol):
    """Shows the progress of a run; never waits for the device."""

    def step(self, state: State, progress: float) -> None: ...

    def log(self, kind: str, state: State, values: dict[str, float]) -> None: ...

    def info(self, text: str) -> None:
        """Show a line; an empty text shows nothing."""
        ...


class RunStore(Protocol):
    """Storage for metrics and checkpoints of a run; rank 0 writes one folder."""

    def log(self, kind: str, state: State, values: dict[str, float]) -> None:
        """Write a row of metrics: `kind` is "train" or "val"."""
        ...

    def checkpoint(self, state: State, tensors: dict[str, Tensor], info: dict[str, Any], best: bool) -> None:
        """Write a checkpoint atomically: after a crash, the old or the new one exists."""
        ...

    def restore(self) -> tuple[State, dict[str, Tensor], dict[str, Any]] | None:
        """Return the newest complete checkpoint, or None for a new run."""
        ...
