"""Other forms of a frozen forward: an exported graph that onnxruntime or OpenVINO runs on the CPU, int8 and float8.

int8 and float8 in torch go through torchao. They are never chosen unasked, since they change the answers. On a GPU they
were not run yet. On a CPU int8 in torch was 15 times slower than float32; onnxruntime's int8 is the fast one there.

Shape legend: B images of a batch, C classes, S pixels a side.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kd.errors import BackendError, MissingExtra
from kd.models.classifier import Classifier
from kd.models.onnx import export_program, onnx_runner, openvino_runner, quiet, write_int8, write_onnx
from kd.types import Outputs

FP8_CAPABILITY = (8, 9)
"""The first NVIDIA generation (Ada) with float8 products."""


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
            runtime: "onnxruntime" or "openvino".
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


def quantize(model: nn.Module, precision: str) -> nn.Module:
    """Quantize the linear layers of a frozen classifier's network, in place, and return it.

    Weights get one scale an output channel, inputs are quantized as they come.

    Args:
        model: with a `network`, on its device.
        precision: "int8" or "fp8".

    Raises:
        MissingExtra: torchao is not installed.
        BackendError: the device has no float8.
    """
    network: Any = model.network
    if precision == "fp8":
        require_fp8(next(network.parameters()).device)
    with quiet():
        torchao = packaged()
        kind = {"int8": "Int8DynamicActivationInt8WeightConfig", "fp8": "Float8DynamicActivationFloat8WeightConfig"}
        torchao.quantize_(network, getattr(torchao, kind[precision])())
    return model


def packaged() -> Any:
    """Import torchao's quantization.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module("torchao.quantization")
    except ImportError as error:
        remedy = "pip install 'kd[quantize]', or set teacher.precision=auto"
        raise MissingExtra(
            "teacher.precision", "torch quantizes by torchao, which is not installed", "", remedy
        ) from error


def require_fp8(device: torch.device) -> None:
    """Require a device that multiplies in float8.

    Raises:
        BackendError: it does not; the device is named.
    """
    name, capability = str(device), (0, 0)
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        found = f" of compute capability {capability[0]}.{capability[1]}" if device.type == "cuda" else ""
        raise BackendError(
            "teacher.precision",
            f"is fp8, which the device '{name}'{found} does not have",
            "float8 goes with NVIDIA GPUs of compute capability 8.9 or above",
            "Set teacher.precision=auto",
        )
