"""An export folder as something that answers: its graph in onnxruntime or OpenVINO, its labels, its pixels."""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kd.errors import MissingExtra, ModelError

Engine = Callable[[np.ndarray], np.ndarray]
"""uint8 [B, 3, S, S] to logits [B, C]; may be called by several threads at once."""
ENDINGS = {"model.onnx": "", "model.int8.onnx": "-int8", "openvino.xml": "-openvino"}


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded export."""

    name: str
    version: str
    """First digits of the weights' hash, and the graph's kind where it is not model.onnx."""
    labels: tuple[str, ...]
    size: int
    """Side of the crop, pixels."""
    crop: float
    engine: Engine

    def warm_up(self, times: int = 3) -> None:
        """Answer for a grey image, so that no client waits for first-time allocations.

        Raises:
            ModelError: the graph does not take or return what the manifest says.
        """
        grey = np.full((1, 3, self.size, self.size), 127, np.uint8)
        for _ in range(times):
            try:
                shape = self.engine(grey).shape
            except Exception as error:  # runtimes have their own, unrelated error types
                raise _unfit(f"the graph fails on a grey image ({_first_line(error)})") from error
            if shape != (1, len(self.labels)):
                raise _unfit(f"the graph returns {shape}, but there are {len(self.labels)} labels")


@dataclass(frozen=True, slots=True)
class Description:
    """What an export folder says about itself, read before the socket opens."""

    folder: Path
    file: str
    name: str
    version: str
    labels: tuple[str, ...]
    size: int
    crop: float
    files: dict[str, Any]


def describe(folder: Path, file: str = "model.onnx") -> Description:
    """Read an export's manifest and labels; the graph is not touched yet.

    Raises:
        ModelError: not an export, one without graphs, or one changed since it was written.
    """
    manifest, config = _json(folder, "manifest.json"), _json(folder, "config.json")
    try:
        size, crop, files = int(manifest["input"]["size"]), float(manifest["input"]["crop"]), dict(manifest["files"])
        labels = tuple(map(str, config["label_names"]))
        name, version = str(manifest["name"]), str(manifest["version"])
    except (KeyError, TypeError, ValueError) as error:
        raise _unfit(f"'{folder}' lacks {error} in manifest.json or config.json") from error
    if file not in files or file not in ENDINGS:
        there = ", ".join(sorted(ENDINGS.keys() & files.keys())) or "no graph at all"
        option = {"model.int8.onnx": " --int8", "openvino.xml": " --openvino"}.get(file, "")
        raise ModelError(
            "--file", f"'{folder}' has no '{file}'", f"There is {there}", f"Export anew: kd-export RUN{option}"
        )
    _verified(folder, "config.json", files)
    return Description(folder, file, name, version + ENDINGS[file], labels, size, crop, files)


def load(told: Description, threads: int, slots: int) -> Model:
    """Load the graph.

    Args:
        told: what to load.
        threads: for one call.
        slots: how many calls there will be at once.

    Raises:
        ModelError: the file is not what was exported, or the runtime refuses it.
        MissingExtra: the runtime is not installed.
    """
    content = _verified(told.folder, told.file, told.files)
    try:
        if told.file.endswith(".onnx"):
            engine = _onnx(content, threads)
        else:
            weights = _verified(told.folder, "openvino.bin", told.files)
            engine = _openvino(content, weights, threads, slots)
    except MissingExtra:
        raise
    except Exception as error:  # runtimes have their own, unrelated error types
        raise _unfit(f"'{told.file}' cannot be loaded ({_first_line(error)})") from error
    return Model(told.name, told.version, told.labels, told.size, told.crop, engine)


def _onnx(content: bytes, threads: int) -> Engine:
    runtime = _import("onnxruntime", "pip install onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Threads that spin while they wait take the core from whoever decodes the next image.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(["logits"], {"image": pixels})[0]


def _openvino(content: bytes, weights: bytes, threads: int, slots: int) -> Engine:
    openvino = _import("openvino", "pip install 'kd[openvino]'")
    core = openvino.Core()
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",  # what kd-export compared; bfloat16 would be another model
        "NUM_STREAMS": str(slots),
        "INFERENCE_NUM_THREADS": str(threads * slots),
    }
    compiled = core.compile_model(core.read_model(content, weights), "CPU", settings)
    mine = threading.local()

    def run(pixels: np.ndarray) -> np.ndarray:
        if not hasattr(mine, "request"):
            mine.request = compiled.create_infer_request()
        return next(iter(mine.request.infer({0: pixels}).values())).copy()

    return run


def _import(name: str, remedy: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra("kd-serve", f"{name} is not installed", "", remedy) from error


def _json(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        remedy = "Name the folder that `kd-export RUN` wrote: runs/NAME/export"
        raise ModelError("kd-serve", f"'{folder}' is not an export: it has no {name}", "", remedy) from error
    except (OSError, ValueError) as error:
        raise _unfit(f"'{folder / name}' cannot be read ({type(error).__name__})") from error


def _verified(folder: Path, name: str, files: dict[str, Any]) -> bytes:
    """Read a file and compare it with the manifest; what is compared is what is used."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise _unfit(f"'{folder / name}' cannot be read ({error.strerror})") from error
    expected = files.get(name, {}).get("sha256")
    if hashlib.sha256(content).hexdigest() != expected:
        raise _unfit(f"'{folder / name}' is not the file that was exported (its sha256 differs from manifest.json)")
    return content


def _unfit(wrong: str) -> ModelError:
    return ModelError("kd-serve", wrong, "A folder as `kd-export` wrote it", "Export anew: kd-export RUN")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
