"""Other ways to run a frozen model: an exported graph in onnxruntime or OpenVINO on the CPU, int8, float8.

int8 and float8 in torch use torchao. `auto` never chooses them, since they change the outputs. They were not run on a
GPU yet. On a CPU, torch's int8 was 15 times slower than float32; use onnxruntime's int8 there.

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
"""Compute capability of the first NVIDIA GPUs (Ada) with float8 matrix products."""


class Exported(nn.Module):
    """A classifier as an exported graph, from uint8 [B, 3, S, S] on the CPU to logits [B, C]; no features or gradients.

    It has no torch weights and no files: the graph stays in memory. A session has a fixed number of threads, so another
    one is made when torch's number changes. Two are kept, since trials alternate between two numbers.
    """

    def __init__(self, model: Classifier, size: int, runtime: str, int8: bool = False) -> None:
        """Export a classifier, which takes seconds.

        Args:
            model: in eval mode, float32, on the CPU, without features.
            size: S.
            runtime: "onnxruntime" or "openvino".
            int8: quantize the weights of matrix products, and their inputs dynamically.

        Raises:
            MissingExtra: a package is not installed.
            ModelError: the network cannot be exported. A runtime may still reject the graph in the first forward,
                with its own error.
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
        return onnx_runner(self.graph, threads, spin=False)  # torch's threads use the cores between two calls


def exported(model: Classifier, size: int, int8: bool = False) -> bytes:
    """Return the bytes of a classifier's ONNX file; temporary files are removed."""
    with tempfile.TemporaryDirectory(prefix="kd-") as folder:
        path = Path(folder) / "model.onnx"
        write_onnx(export_program(model, size), path)
        if int8:
            write_int8(path, path.with_suffix(".int8.onnx"))
            path = path.with_suffix(".int8.onnx")
        return path.read_bytes()


def quantize(model: nn.Module, precision: str) -> nn.Module:
    """Quantize the linear layers of a frozen classifier's network, in place, and return it.

    Weights have one scale per output channel. Inputs are quantized dynamically.

    Args:
        model: has a `network`, which is on its device.
        precision: "int8" or "fp8".

    Raises:
        MissingExtra: torchao is not installed.
        BackendError: the device does not support float8.
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
        MissingExtra: torchao is not installed.
    """
    try:
        return importlib.import_module("torchao.quantization")
    except ImportError as error:
        remedy = "pip install 'kd[quantize]', or set teacher.precision=auto"
        raise MissingExtra(
            "teacher.precision", "torch quantizes with torchao, which is not installed", "", remedy
        ) from error


def require_fp8(device: torch.device) -> None:
    """Require a device with float8 matrix products.

    Raises:
        BackendError: the device has none; the message names it.
    """
    name, capability = str(device), (0, 0)
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        found = f" of compute capability {capability[0]}.{capability[1]}" if device.type == "cuda" else ""
        raise BackendError(
            "teacher.precision",
            f"is fp8, which the device '{name}'{found} does not have",
            "float8 needs an NVIDIA GPU of compute capability 8.9 or above",
            "Set teacher.precision=auto",
        )
