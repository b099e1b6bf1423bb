"""Load a graph in onnxruntime or OpenVINO, and say which of them reads it."""

import re
import threading
from collections.abc import Callable

import numpy as np

from kd.core.errors import MissingExtra, needed
from kd.core.host import signal_stack, versions
from kd.files.manifest import GRAPHS

WHERE = "export"
Engine = Callable[[np.ndarray], np.ndarray]  # uint8 [B, 3, S, S] to logits [B, C] or vectors [B, D]; thread-safe
OLDEST = {
    "onnxruntime": ((10, 21, "1.20"), (10, 22, "1.21"), (11, 23, "1.23"), (13, 25, "1.24")),
    "openvino": ((11, 15, "2024.5"),),
}
"""Newest IR and opset that a version reads: each was installed and asked. Below the first no version was tried."""


def oldest(runtime: str, ir: int, opset: int) -> str:
    """Return the least version of a runtime that reads a graph: where the table ends, the version here."""
    found = (name for newest_ir, newest, name in OLDEST[runtime] if ir <= newest_ir and opset <= newest)
    return next(found, versions(runtime)[runtime])


def require_version(file: str, least: str) -> None:
    """Refuse a runtime that is older than the one that a graph needs."""
    runtime = GRAPHS[file].runtime
    here = versions(runtime)[runtime]
    if _digits(here) and _digits(here) < _digits(least):
        wrong, allowed = f"'{file}' needs {runtime} {least}, and {here} is here", f"{runtime} {least} or newer"
        raise MissingExtra(WHERE, wrong, allowed, f"pip install '{runtime}>={least}'")


def _digits(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def engine_of(file: str, content: bytes, weights: bytes, threads: int, slots: int) -> Engine:
    """Load a graph by the name of its file; `weights` are OpenVINO's. A runtime's own error: it is damaged."""
    runtime, precision, _ = GRAPHS[file]
    if runtime == "onnxruntime":
        return _onnx(content, threads)
    return _openvino(content, weights, threads, slots, "bf16" if precision == "bf16" else "f32")


def _onnx(content: bytes, threads: int) -> Engine:
    runtime = needed("onnxruntime", WHERE, "onnxruntime is not installed", "pip install onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # A thread that spins while it waits takes CPU time from the decoding of other images.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(None, {"image": pixels})[0]


def _openvino(content: bytes, weights: bytes, threads: int, slots: int, hint: str) -> Engine:
    remedy = "pip install 'PATH/kd[openvino]', or choose --file model.onnx"
    openvino = needed("openvino", WHERE, "openvino is not installed", remedy)
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
