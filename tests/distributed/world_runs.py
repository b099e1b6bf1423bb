"""Finished runs of the real trainer in worlds of real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ranks import World
from safetensors.torch import load_file
from torch import Tensor

BATCH, STEPS = 12, 20


class Trained(NamedTuple):
    """A finished run."""

    world: World
    folder: Path

    def checkpoint(self, step: int = STEPS) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: weights, average, optimizer."""
        return load_file(self.folder / "checkpoints" / f"step_{step:08d}" / "tensors.safetensors")

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl of a kind."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def ids(self, world_size: int, micros: int) -> list[list[int]]:
        """Return what each step was trained on, put together from the records of all ranks."""
        record = self.folder.with_suffix(".record")
        texts = [(record / f"rank_{rank}.jsonl").read_text() for rank in range(world_size)]
        seen = [[json.loads(line) for line in text.splitlines()] for text in texts]
        steps = len(seen[0]) // micros
        return [
            [id for i in range(micros) for rank in range(world_size) for id in seen[rank][step * micros + i]]
            for step in range(steps)
        ]
