"""The graph of an export, loaded in onnxruntime or OpenVINO."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from kd.core.errors import MissingExtra
from kd.core.host import signal_stack
from kd.deploy.serve.description import WHERE, Description, first_line, invalid_export, read_verified
from kd.files.manifest import GRAPHS

Engine = Callable[[np.ndarray], np.ndarray]
"""Maps uint8 [B, 3, S, S] to logits [B, C], or vectors [B, D] of an embedding model. Thread-safe."""


@dataclass(frozen=True, slots=True)
class LoadedGraph(Description):
    """A loaded export."""

    engine: Engine

    def warm_up(self, times: int = 3) -> None:
        """Run the graph on a grey image, so that the first client does not wait for allocations."""
        grey = np.full((1, 3, self.size, self.size), 127, np.uint8)
        for _ in range(times):
            try:
                shape = self.engine(grey).shape
            except Exception as error:  # runtimes have their own, unrelated error types
                raise invalid_export(f"the graph fails on a grey image ({first_line(error)})") from error
            if shape != (1, self.output.width):
                wrong = f"the graph returns {shape}, but manifest.json says {self.output.width} {self.output.name}"
                raise invalid_export(wrong)


def load(description: Description, threads: int, slots: int) -> LoadedGraph:
    """Load the graph, for at most `slots` calls at the same time, each with so many threads."""
    content = read_verified(description.folder, description.file, description.files)
    try:
        runtime, precision, _ = GRAPHS[description.file]
        if runtime == "onnxruntime":
            engine = _onnx(content, threads)
        else:
            name = str(Path(description.file).with_suffix(".bin"))
            weights = read_verified(description.folder, name, description.files)
            engine = _openvino(content, weights, threads, slots, "bf16" if precision == "bf16" else "f32")
    except MissingExtra:
        raise
    except Exception as error:  # runtimes have their own, unrelated error types
        raise invalid_export(f"'{description.file}' cannot be loaded ({first_line(error)})") from error
    return LoadedGraph(**{field.name: getattr(description, field.name) for field in fields(description)}, engine=engine)


def _onnx(content: bytes, threads: int) -> Engine:
    runtime = _import("onnxruntime", "pip install onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # A thread that spins while it waits takes CPU time from the decoding of other images.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(None, {"image": pixels})[0]


def _openvino(content: bytes, weights: bytes, threads: int, slots: int, hint: str) -> Engine:
    openvino = _import("openvino", "pip install 'kd[openvino]', or choose --file model.onnx")
    settings = {
        "INFERENCE_PRECISION_HINT": hint,  # what kd-export compared with PyTorch, whatever OpenVINO would choose here
        "NUM_STREAMS": str(slots),
        "INFERENCE_NUM_THREADS": str(threads * slots),
    }
    with signal_stack():
        core = openvino.Core()
        compiled = core.compile_model(core.read_model(content, weights), "CPU", settings)
    local, first = threading.local(), threading.Lock()

    def run(pixels: np.ndarray) -> np.ndarray:
        # The first answer of one thread ends before that of the next begins: of two at once one held a guard of
        # OpenVINO's C++ code and waited for Python's lock, the other the reverse, and the server was never ready.
        if not hasattr(local, "request"):
            with first:
                request = compiled.create_infer_request()
                request.infer({0: pixels})
            local.request = request
        return next(iter(local.request.infer({0: pixels}).values())).copy()

    return run


def _import(name: str, remedy: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(WHERE, f"{name} is not installed", "", remedy) from error
