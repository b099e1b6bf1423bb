"""The files of an export as variants: how right each is, how fast on this machine, and which one to ship.

A variant is one graph in one precision, and one file name. How right it is comes from the run's validation images
(`Judge`). How fast it is comes from `kd-serve` itself (`kd.serve.bench`): a time is what one client waits for an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kd.evaluation import Task
from kd.export import parity
from kd.models import runtimes
from kd.scores import GraphScores

FLOAT32 = "model.onnx"
KNOWN = {
    FLOAT32: ("onnxruntime", "float32"),
    "model.int8.onnx": ("onnxruntime", "int8"),
    "openvino.xml": ("openvino", "float32"),
    "openvino.bf16.xml": ("openvino", "bf16"),
    "openvino.int8.xml": ("openvino", "int8"),
}
"""Runtime and precision by file name."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One graph of an export."""

    name: str
    """Its file name, by which `kd-serve --file` finds it."""
    runtime: str
    """"onnxruntime" or "openvino"."""
    precision: str
    """"float32", "bf16" or "int8"."""
    paths: tuple[Path, ...]
    """The graph, and the file of its weights where they lie apart."""

    @classmethod
    def at(cls, path: Path) -> Variant:
        """Return the variant in a file; its name says what it is."""
        runtime, precision = KNOWN[path.name]
        return cls(path.name, runtime, precision, (path, path.with_suffix(".bin"))[: 1 + (path.suffix == ".xml")])

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(path.stat().st_size for path in self.paths)

    def runner(self, threads: int = 1) -> parity.Runner:
        """Return a function from uint8 [B, 3, S, S] to float32 logits [B, C] or vectors [B, D]."""
        if self.runtime == "openvino":
            return runtimes.openvino_runner(self.paths[0], threads, bf16=self.precision == "bf16")
        return runtimes.onnx_runner(self.paths[0], threads)


@dataclass(frozen=True, slots=True)
class Judge:
    """Says how right a graph is, beside the student as it was trained."""

    task: Task
    images: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]
    """Yields uint8 images [B, 3, S, S] with labels [B], always the same N."""
    reference: torch.Tensor
    """What the student as trained returns for them in PyTorch: logits [N, C] or vectors [N, D]."""
    labels: torch.Tensor

    def __call__(self, path: Path) -> GraphScores:
        """Run a graph on all images; `facts[decides]` of what it returns is its score, `others` are other answers."""
        run = Variant.at(path).runner()
        outputs = torch.from_numpy(np.concatenate([run(pixels) for pixels, _ in self.images()]))
        return self.task.graph_scores(outputs, self.reference, self.labels)


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of the table."""

    variant: Variant
    scores: GraphScores
    interval: tuple[float, float]
    """95 % of the score that decides."""
    images: int
    """On which the scores were taken."""
    speed: Mapping[int, Speed]
    """By number of threads."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What a client of `kd-serve --file NAME --threads N` waits for one image at a time, milliseconds."""

    p50_ms: float
    p99_ms: float
    images_per_second: float
    """With as many images at a time as threads."""
    memory_mb: float
    """Resident memory of the server."""
