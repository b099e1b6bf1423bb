"""ExecuTorch's .pte, float32 over XNNPACK, for phones and boards: `--formats
executorch`.

Needs `pip install executorch`. Images run one at a time; ExecuTorch chooses the number
of threads.
"""

import importlib
import threading
import warnings
from pathlib import Path

import numpy as np

from kd.core.errors import import_optional
from kd.core.facts import ExporterFacts, GraphFile, Network
from kd.core.facts import NoOptions as Options
from kd.parts.exporters._exporter import Engine, Exporter

GRAPH = GraphFile(
    "executorch", "float32", option="--formats executorch", cost=6, named=True
)
facts = ExporterFacts(graphs={"model.pte": GRAPH})


class ExecuTorch(Exporter):
    """A program for one image: memory is planned for the largest batch, which would be
    4,096 images.
    """

    runtime = "executorch"

    def write(self, path: Path, network: Network) -> None:
        from kd.models.runtimes import without_warnings

        with without_warnings():
            exir = importlib.import_module("executorch.exir")
            xnnpack = importlib.import_module(
                "executorch.backends.xnnpack.partition.xnnpack_partitioner"
            )
            parts = [xnnpack.XnnpackPartitioner()]
            lowered = exir.to_edge_transform_and_lower(
                network.program(1), partitioner=parts
            )
            path.write_bytes(lowered.to_executorch().buffer)

    def load(
        self, file: str, content: bytes, weights: bytes, threads: int, slots: int
    ) -> Engine:
        torch = import_optional(
            "torch", "export", "torch is not installed", "pip install torch"
        )
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # its classes say that they are experimental
            runtime = import_optional(
                "executorch.runtime",
                "export",
                "executorch is not installed",
                "pip install executorch",
            )
            program, alone = (
                runtime.Runtime.get().load_program(content),
                threading.Lock(),
            )
            held = (
                program,
                content,
                program.load_method("forward"),
            )  # a method uses the memory of both

        def run(pixels: np.ndarray) -> np.ndarray:
            with alone:  # a method owns its memory
                rows = [
                    held[2]
                    .execute([torch.from_numpy(one[None].copy())])[0]
                    .numpy()
                    .copy()
                    for one in pixels
                ]
            return np.concatenate(rows)

        return run


def build(options: Options) -> ExecuTorch:
    """Return the exporter."""
    return ExecuTorch()
