"""int8 and float8 in torch, through torchao. Never chosen unasked: they change what a model says.

On a GPU this was not run yet. On a CPU int8 works, and was 15 times slower than float32 where it was measured; there
onnxruntime's int8 (`kd.models.runtime`) is the fast one.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from kd.errors import BackendError, MissingExtra
from kd.models.onnx import quiet

FP8_CAPABILITY = (8, 9)
"""The first NVIDIA generation (Ada) with float8 products."""


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
