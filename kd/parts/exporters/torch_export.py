"""torch.export's .pt2, for PyTorch itself. It contains a pickle, so no endpoint loads
it.
"""

import io
from pathlib import Path

from kd.core.errors import import_optional
from kd.core.facts import ExporterFacts, GraphFile, Network
from kd.core.facts import NoOptions as Options
from kd.parts.exporters._exporter import Engine, Exporter

facts = ExporterFacts(
    graphs={
        "model.pt2": GraphFile("torch", "float32", option="--pt2", code=True, cost=0)
    }
)


class TorchExport(Exporter):
    """Write an ExportedProgram, which runs on torch's threads."""

    runtime = "torch"

    def write(self, path: Path, network: Network) -> None:
        import torch

        torch.export.save(network.program(0), path)

    def load(
        self, file: str, content: bytes, weights: bytes, threads: int, slots: int
    ) -> Engine:
        torch = import_optional(
            "torch", "export", "torch is not installed", "pip install torch"
        )
        module = torch.export.load(io.BytesIO(content)).module()
        return torch.no_grad()(lambda image: module(torch.from_numpy(image)).numpy())


def build(options: Options) -> TorchExport:
    """Return the exporter."""
    return TorchExport()
