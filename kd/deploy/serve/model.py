"""Load an export folder: its graph in onnxruntime or OpenVINO, its labels, and its input size."""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from kd.core.errors import MissingExtra, ModelError
from kd.core.host import signal_stack
from kd.core.sure import Bands, bands
from kd.deploy.shift import Reference
from kd.files.manifest import GRAPHS, MANIFEST, unchanged

Engine = Callable[[np.ndarray], np.ndarray]
"""Maps uint8 [B, 3, S, S] to logits [B, C], or vectors [B, D] of an embedding model. Thread-safe."""
WHERE = "export"


@dataclass(frozen=True, slots=True)
class Output:
    """What the graph returns for an image."""

    name: str  # "logits" of the labels, or "embedding": a vector of length 1
    width: int
    thresholds: tuple[float, ...] = ()
    """Where an image may have several labels: from which probability it has each. Empty: it has one."""
    unsure: Bands = ()  # see `kd.core.sure`; empty: it does not say which answers are sure

    @property
    def embeds(self) -> bool:
        return self.name == "embedding"


@dataclass(frozen=True, slots=True)
class Description:
    """The metadata of an export folder. It is read before the socket opens."""

    folder: Path
    file: str
    name: str
    version: str  # first digits of the weights' hash, then the kind of graph unless it is model.onnx
    labels: tuple[str, ...]
    output: Output
    size: int  # side of the crop, pixels
    crop: float  # share of the shorter side that the crop keeps
    files: dict[str, str]  # the sha256 of each file, as manifest.json has it
    reference: Reference | None
    """What the graph answered on validation images; None: an older export, or one without them."""


@dataclass(frozen=True, slots=True)
class Model(Description):
    """A loaded export."""

    engine: Engine

    def warm_up(self, times: int = 3) -> None:
        """Run the graph on a grey image, so that the first client does not wait for allocations."""
        grey = np.full((1, 3, self.size, self.size), 127, np.uint8)
        for _ in range(times):
            try:
                shape = self.engine(grey).shape
            except Exception as error:  # runtimes have their own, unrelated error types
                raise _invalid_export(f"the graph fails on a grey image ({_first_line(error)})") from error
            if shape != (1, self.output.width):
                wrong = f"the graph returns {shape}, but manifest.json says {self.output.width} {self.output.name}"
                raise _invalid_export(wrong)


def describe(folder: Path, file: str = "") -> Description:
    """Read an export's manifest and labels, not the graph.

    `file` is the graph's; "": the one that `kd-export --compare` picked, or model.onnx.
    """
    manifest, config = _json(folder, MANIFEST), _json(folder, "config.json")
    if isinstance(manifest, dict) and not unchanged(manifest):
        raise _invalid_export(f"'{folder / MANIFEST}' is not what was exported (its checksum differs)")
    try:
        size, crop = int(manifest["input"]["size"]), float(manifest["input"]["crop"])
        files = {name: str(entry["sha256"]) for name, entry in dict(manifest["files"]).items()}
        output = manifest.get("output", {"name": "logits"})  # older exports: logits alone
        embeds = output["name"] == "embedding"
        labels = () if embeds else tuple(map(str, config["label_names"]))
        entries = output.get("thresholds", {})
        thresholds = tuple(float(entries[label]["threshold"]) for label in labels) if entries else ()
        width, unsure = int(output["width"]) if embeds else len(labels), bands(output, labels)
        output = Output(str(output["name"]), width, thresholds, unsure)
        name, version = str(manifest["name"]), str(manifest["version"])
        file = file or str(manifest.get("pick") or "model.onnx")
        recorded = manifest.get("validation", {}).get(file)
        reference = Reference.read(recorded, labels) if recorded else None
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, OverflowError) as error:
        raise _invalid_export(f"'{folder}' lacks {error} in manifest.json or config.json") from error
    if not (size > 0 and 0 < crop <= 1):
        raise _invalid_export(f"'{folder}' has the input size {size} and the crop {crop} in manifest.json")
    if file not in files or file not in GRAPHS:
        graphs = ", ".join(sorted(GRAPHS.keys() & files.keys())) or "no graph at all"
        remedy = f"Export anew: kd-export RUN {GRAPHS[file].option if file in GRAPHS else ''}".rstrip()
        raise ModelError("--file", f"'{folder}' has no '{file}'", f"There is {graphs}", remedy)
    read_verified(folder, "config.json", files)
    kind = "" if file == "model.onnx" else f"-{Path(file).stem.removeprefix('model.')}"
    return Description(folder, file, name, version + kind, labels, output, size, crop, files, reference)


def load(description: Description, threads: int, slots: int) -> Model:
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
        raise _invalid_export(f"'{description.file}' cannot be loaded ({_first_line(error)})") from error
    return Model(**{field.name: getattr(description, field.name) for field in fields(description)}, engine=engine)


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
    local = threading.local()

    def run(pixels: np.ndarray) -> np.ndarray:
        if not hasattr(local, "request"):
            local.request = compiled.create_infer_request()
        return next(iter(local.request.infer({0: pixels}).values())).copy()

    return run


def _import(name: str, remedy: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(WHERE, f"{name} is not installed", "", remedy) from error


def _json(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        remedy = "Name the folder that `kd-export RUN` wrote: runs/NAME/export"
        raise ModelError(WHERE, f"'{folder}' is not an export: it has no {name}", "", remedy) from error
    except (OSError, ValueError) as error:
        raise _invalid_export(f"'{folder / name}' cannot be read ({type(error).__name__})") from error


def read_verified(folder: Path, name: str, files: dict[str, str]) -> bytes:
    """Read a file once, compare its hash with the manifest, and return the bytes."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise _invalid_export(f"'{folder / name}' cannot be read ({error.strerror})") from error
    if hashlib.sha256(content).hexdigest() != files.get(name):
        wrong = f"'{folder / name}' is not the file that was exported (its sha256 differs from manifest.json)"
        raise _invalid_export(wrong)
    return content


def _invalid_export(wrong: str) -> ModelError:
    return ModelError(WHERE, wrong, "A folder as `kd-export` wrote it", "Export anew: kd-export RUN")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
