"""The frozen forward outside torch: an exported graph that onnxruntime or OpenVINO runs on the CPU.

Shape legend: B images of a batch, C classes, S pixels a side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from kd.models.classifier import Classifier
from kd.models.onnx import export_program, onnx_runner, openvino_runner, write_int8, write_onnx
from kd.types import Outputs

RUNTIMES = ("onnxruntime", "openvino")
"""What can run an exported graph."""


class Exported(nn.Module):
    """A classifier as a graph: uint8 [B, 3, S, S] on the CPU in, logits [B, C] out; no features, no gradients.

    It holds no torch weights. The graph stays in memory, and with it nothing is left on the disk: a session has a fixed
    number of threads and another one is made when torch's changes, as the probes of a run do, in turns of two.
    """

    def __init__(self, model: Classifier, size: int, runtime: str, int8: bool = False) -> None:
        """Export a classifier; takes seconds.

        Args:
            model: in eval mode, float32, on the CPU, without features.
            size: S.
            runtime: one of `RUNTIMES`.
            int8: quantize the weights of its matrix products, and their inputs as they come.

        Raises:
            MissingExtra: a package is not installed.
            ModelError: the network cannot be expressed as a graph. A runtime may still refuse the graph when it first
                runs, in an error of its own.
        """
        super().__init__()
        self.runtime, self.graph = runtime, exported(model, size, int8)
        self._sessions: dict[int, Callable[[np.ndarray], np.ndarray]] = {}

    def forward(self, image: Tensor) -> Outputs:
        """Classify uint8 images [B, 3, S, S]; return float32 logits [B, C]."""
        threads = torch.get_num_threads()
        if threads not in self._sessions:
            latest = dict(list(self._sessions.items())[-1:])
            self._sessions = {**latest, threads: self._start(threads)}
        return Outputs(torch.from_numpy(self._sessions[threads](image.contiguous().numpy())))

    def _start(self, threads: int) -> Callable[[np.ndarray], np.ndarray]:
        if self.runtime == "openvino":
            return openvino_runner(self.graph, threads)
        return onnx_runner(self.graph, threads, spin=False)  # between two calls torch's threads want the cores


def exported(model: Classifier, size: int, int8: bool = False) -> bytes:
    """Return an ONNX file of a classifier; what is written on the way is removed."""
    with tempfile.TemporaryDirectory(prefix="kd-") as folder:
        path = Path(folder) / "model.onnx"
        write_onnx(export_program(model, size), path)
        if int8:
            write_int8(path, path.with_suffix(".int8.onnx"))
            path = path.with_suffix(".int8.onnx")
        return path.read_bytes()
