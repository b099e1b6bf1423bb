"""The RunStore of runs without a folder: rows stay in memory, checkpoints are not written."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kd.types import State


class Memory:
    """Keep the metrics of a run in memory. See `kd.contracts.RunStore`."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, kind: str, state: State, values: dict[str, float]) -> None:
        self.rows.append({"kind": kind, "step": state.step, "images": state.images, **values})

    def checkpoint(self, state: State, tensors: dict[str, Tensor], info: dict[str, Any], best: bool) -> None:
        """Nothing: the caller holds the student."""

    def restore(self) -> None:
        return None
