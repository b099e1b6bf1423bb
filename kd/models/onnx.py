"""A student as graphs that run without timm: ONNX, its int8 form, torch.export's .pt2, OpenVINO's IR.

Every graph takes what the evaluation's crop delivers, uint8 [batch, 3, S, S] with S of `data.image_size`, and returns
logits [batch, C]: normalization, and the resize of a network with another input size, lie inside. So whoever runs it
needs no constant from anywhere else.

onnx, onnxscript, onnxruntime and openvino are imported when one of them is asked for.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kd.errors import MissingExtra, ModelError
from kd.models.classifier import Classifier

OPSET = 20
LARGEST_BATCH = 4096
INPUT, OUTPUT = "image", "logits"


class Graph(nn.Module):
    """A classifier for export: uint8 [B, 3, S, S] in, logits [B, C] out.

    The resize to the network's own size is two matrix products: resizing is linear in the pixels and separable, and a
    product means the same to every runtime, whereas "bicubic, antialiased" does not. They run on planes [B * 3, S, S]:
    OpenVINO 2026.4 merges the normalization into a product of four dimensions and takes channels for columns.
    """

    matrix: Tensor | None

    def __init__(self, model: Classifier, size: int) -> None:
        """Wrap `model` for images of `size` pixels a side."""
        super().__init__()
        self.model = model
        target = model.input_size
        matrix = None
        if target and target != size:
            identity = torch.eye(size)[None, None]
            matrix = F.interpolate(identity, size=(target, size), mode="bicubic", antialias=True)[0, 0]
        self.register_buffer("matrix", matrix, persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        """Classify uint8 images [B, 3, S, S]; return logits [B, C]."""
        pixels = image.to(torch.float32)
        if self.matrix is not None:
            planes = self.matrix @ pixels.flatten(0, 1) @ self.matrix.T
            pixels = planes.unflatten(0, (-1, 3)).clamp(0, 255)
        model = self.model
        return model.network(torch.addcmul(model.shift, pixels, model.scale))  # type: ignore[arg-type]


def export_program(model: Classifier, size: int) -> torch.export.ExportedProgram:
    """Trace a classifier with a free batch dimension.

    Raises:
        ModelError: the network cannot be traced.
    """
    graph = Graph(model, size).eval()
    # Traced with two images: torch takes a dimension of one for a constant.
    example = (torch.zeros(2, 3, size, size, dtype=torch.uint8),)
    batch = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
    try:
        with torch.no_grad():
            return torch.export.export(graph, example, dynamic_shapes=({0: batch},))
    except Exception as error:  # torch.export fails in its own ways, all of them the network's
        raise _failed("torch.export", error) from error


def write_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a .pt2 file, which `torch.export.load(path).module()` runs without timm."""
    torch.export.save(program, path)


def write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write one ONNX file, weights inside.

    Raises:
        MissingExtra: onnx or onnxscript is not installed.
        ModelError: a layer has no ONNX form, or the weights are above 2 GB.
    """
    for name in ("onnx", "onnxscript"):
        require(name, "--onnx")
    try:
        with quiet():
            torch.onnx.export(
                program,
                f=path,
                opset_version=OPSET,
                dynamo=True,
                external_data=False,
                input_names=[INPUT],
                output_names=[OUTPUT],
                verbose=False,
            )
    except Exception as error:  # the exporter fails in its own ways, all of them the network's
        raise _failed("torch.onnx.export", error) from error


def write_int8(source: Path, path: Path) -> None:
    """Write an ONNX file whose matrix products have int8 weights, one scale a channel, and quantize at run time.

    Convolutions stay float32: onnxruntime's integer convolution is slower than the one it replaces.

    Raises:
        MissingExtra: onnx or onnxruntime is not installed.
    """
    onnx = require("onnx", "--int8")
    require("onnxruntime", "--int8")
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(source)
    del graph.graph.value_info[:]  # shapes noted before the exporter turned weights round; they are inferred anew
    with quiet():
        quantize_dynamic(
            graph, path, op_types_to_quantize=["MatMul", "Gemm"], per_channel=True, weight_type=QuantType.QInt8
        )


def write_openvino(source: Path, path: Path) -> None:
    """Write OpenVINO's IR, `path` (.xml) and the .bin beside it, with float32 weights.

    Raises:
        MissingExtra: openvino is not installed.
    """
    openvino = require("openvino", "--openvino", "openvino")
    with quiet():
        openvino.save_model(openvino.convert_model(str(source)), str(path), compress_to_fp16=False)


def onnx_runner(source: Path | bytes, threads: int = 1, spin: bool = True) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from uint8 [B, 3, S, S] to logits [B, C].

    Args:
        source: the file, or what stands in it.
        threads: of the session, the caller's included.
        spin: let them wait for work by spinning, which is faster where nothing else wants the cores.

    Raises:
        MissingExtra: onnxruntime is not installed.
    """
    runtime = require("onnxruntime", "--onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    if not spin:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    model = source if isinstance(source, bytes) else str(source)
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda image: session.run([OUTPUT], {INPUT: image})[0]


def openvino_runner(source: Path | bytes, threads: int = 0) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from uint8 [B, 3, S, S] to logits [B, C], computed in float32.

    Args:
        source: a file, OpenVINO's or ONNX; or what stands in an ONNX file.
        threads: how many it may use; 0: as OpenVINO sees fit.

    Raises:
        MissingExtra: openvino is not installed.
    """
    openvino = require("openvino", "--openvino", "openvino")
    core, options = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
    options |= {"INFERENCE_NUM_THREADS": str(threads)} if threads else {}
    compiled = core.compile_model(core.read_model(source), "CPU", options)
    return lambda image: next(iter(compiled(image).values()))


def program_runner(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from uint8 [B, 3, S, S] to logits [B, C]."""
    module = torch.export.load(path).module()

    def run(image: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return module(torch.from_numpy(image)).numpy()

    return run


def require(name: str, option: str, extra: str = "") -> Any:
    """Import a package.

    Raises:
        MissingExtra: it is not installed; the remedy names what brings it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        remedy = f"pip install 'kd[{extra}]'" if extra else f"pip install {name}, or export with --no-onnx"
        raise MissingExtra(option, f"{name} is not installed", "", remedy) from error


def _failed(tool: str, error: Exception) -> ModelError:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
    remedy = "Export with --no-onnx: timm and Hugging Face load that folder"
    return ModelError("student.model", f"{tool} cannot express this network ({reason})", "", remedy)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' notes about their own internals from the user, who can do nothing about them."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
