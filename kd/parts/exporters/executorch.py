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
    """Write a program for one image."""

    # Memory is planned for the largest batch, which would be 4,096 images.

    runtime = "executorch"

    def write(self, path: Path, network: Network) -> None:
        from kd.models.runtimes import without_warnings

        with without_warnings():
            exir = importlib.import_module("executorch.exir")
            xnnpack = importlib.import_module(
                "executorch.backends.xnnpack.partition.xnnpack_partitioner"
            )
            lowered = exir.to_edge_transform_and_lower(
                network.program(1), partitioner=[xnnpack.XnnpackPartitioner()]
            )
            path.write_bytes(lowered.to_executorch().buffer)

    def load(
        self, file: str, content: bytes, weights: bytes, threads: int, slots: int
    ) -> Engine:
        torch = import_optional(
            "torch", "export", "torch is not installed", "pip install torch"
        )
        with warnings.catch_warnings():
            # its classes say that they are experimental
            warnings.simplefilter("ignore")
            runtime = import_optional(
                "executorch.runtime",
                "export",
                "executorch is not installed",
                "pip install executorch",
            )
            program = runtime.Runtime.get().load_program(content)
            # a method uses the memory of the program and of its content
            loaded = (program.load_method("forward"), program, content)
        lock = threading.Lock()

        def run(pixels: np.ndarray) -> np.ndarray:
            rows = []
            with lock:  # a method owns its memory
                for image in pixels:
                    outputs = loaded[0].execute([torch.from_numpy(image[None].copy())])
                    rows.append(outputs[0].numpy().copy())
            return np.concatenate(rows)

        return run


def build(options: Options) -> ExecuTorch:
    """Return the exporter."""
    return ExecuTorch()
