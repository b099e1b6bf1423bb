"""Finished runs of the engine on torch_xla."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

STEPS = 20


class Trained(NamedTuple):
    """A finished run."""

    folder: Path

    def rows(self, kind: str = "train") -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl of a kind."""
        rows = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [row for row in rows if row["kind"] == kind]

    def losses(self) -> list[float]:
        """Return the loss of every row."""
        return [row["loss"] for row in self.rows()]

    def checkpoint(self, step: int = STEPS) -> dict[str, Any]:
        """Return the tensors of a checkpoint."""
        from safetensors.torch import load_file

        return load_file(self.folder / "checkpoints" / f"step_{step:08d}" / "tensors.safetensors")
