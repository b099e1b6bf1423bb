"""Export a classifier to graphs that run without timm, and run them.

They are ONNX, int8 ONNX, torch.export's .pt2 and OpenVINO's IR.

Each graph maps evaluation's crop, uint8 [batch, 3, S, S] with S = `data.image_size`, to
logits [batch, C], or for an embedding model to vectors [batch, D] of length 1. It
contains the normalization, and the resize if the network has another input size, so
users need no other constants.

Packages are imported only when needed.
"""

import copy
import importlib
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.errors import MissingExtra, ModelError, first_sentence, import_optional
from kd.core.host import installed, signal_stack
from kd.core.types import Outputs
from kd.models.classifier import Classifier
from kd.models.timm_folder import is_timm

OPSET = 20  # ONNX opset: the first with GELU as one operator
OLDEST_EXPORTER = "2.9"  # oldest torch with a tested exporter
# upper bound of the dynamic batch, which torch.export requires; kd's batches are
# smaller
LARGEST_BATCH = 4096
INPUT = "image"
LOGITS = "logits"
EMBEDDING = "embedding"
# most timed calls each: a median of 30 is robust to a third of disturbed calls
ROUNDS = 30


class Graph(nn.Module):
    """Map uint8 [B, 3, S, S] to logits [B, C] by a classifier, for export."""

    # The resize to the network's size is two matrix products, which are equal in all
    # runtimes, unlike antialiased bicubic resizing. They run on planes [B * 3, S, S],
    # because OpenVINO 2026.4 fuses the normalization into a four-dimensional product
    # and confuses channels with columns.

    matrix: Tensor | None

    def __init__(self, model: Classifier, size: int) -> None:
        super().__init__()
        self.model = model
        target = model.input_size
        matrix = None
        if target and target != size:
            # [target, size]: matrix @ plane @ matrix.T resizes a plane of an image
            identity = torch.eye(size)[None, None]
            matrix = F.interpolate(
                identity, size=(target, size), mode="bicubic", antialias=True
            )[0, 0]
        self.register_buffer("matrix", matrix, persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        pixels = image.to(torch.float32)
        if self.matrix is not None:
            planes = self.matrix @ pixels.flatten(0, 1) @ self.matrix.T
            pixels = planes.unflatten(0, (-1, 3)).clamp(0, 255)
        model = self.model
        return model.head(torch.addcmul(model.shift, pixels, model.scale))  # type: ignore[arg-type]


def reparameterized(model: Classifier) -> Classifier:
    """Return a copy with branches merged by timm (repvit, fastvit).

    It has fewer layers and the same outputs.
    """
    # The model is not changed. Without such layers it is returned itself.
    from timm.utils.model import reparameterize_model  # needed only for exports

    branches = ("fuse", "reparameterize", "switch_to_deploy")
    network = getattr(model.network, "inner", model.network)
    if not is_timm(network) or not any(
        hasattr(layer, name) for layer in network.modules() for name in branches
    ):
        return model
    merged = copy.copy(model)
    network = reparameterize_model(model.network.eval())
    merged._modules = {**model._modules, "network": network}
    return merged


def export_program(
    model: Classifier, size: int, images: int = 0
) -> torch.export.ExportedProgram:
    """Trace a classifier for a batch size; 0: with a dynamic batch dimension."""
    graph = Graph(model, size).eval()
    # The trace uses two images, because torch treats a dimension of size 1 as constant.
    example = (torch.zeros(images or 2, 3, size, size, dtype=torch.uint8),)
    shapes = None
    if not images:
        shapes = ({0: torch.export.Dim("batch", min=1, max=LARGEST_BATCH)},)
    try:
        with torch.no_grad():
            program = torch.export.export(graph, example, dynamic_shapes=shapes)
    # torch.export raises many types; all are caused by the network
    except Exception as error:
        raise _export_error("torch.export", error) from error
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                # exports are published, and it names folders of this machine
                node.meta.pop("stack_trace", None)
    return program


def write_onnx(
    program: torch.export.ExportedProgram, path: Path, output: str = LOGITS
) -> None:
    """Write one ONNX file, including the weights."""
    if torch.__version__ < OLDEST_EXPORTER:
        raise MissingExtra(
            "the ONNX export",
            f"cannot be done by torch {torch.__version__}",
            f"torch {OLDEST_EXPORTER} or newer",
            "Export the run folder on a machine that has it",
        )
    for name in ("onnx", "onnxscript"):
        import_package(name, "--onnx")
    try:
        with without_warnings():
            torch.onnx.export(
                program,
                f=path,
                input_names=[INPUT],
                output_names=[output],
                opset_version=OPSET,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    # the exporter raises many types; all are caused by the network
    except Exception as error:
        raise _export_error("torch.onnx.export", error) from error


def write_int8(source: Path, path: Path) -> None:
    """Write an ONNX file of int8 matrix products.

    Weights have a scale per channel; inputs are quantized dynamically.
    """
    # Convolutions stay float32, because onnxruntime's integer convolution is slower.
    onnx = import_package("onnx", "--int8")
    import_package("onnxruntime", "--int8")
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(source)
    # outdated shapes (before weights were transposed); onnxruntime infers them again
    del graph.graph.value_info[:]
    with without_warnings():
        quantize_dynamic(
            graph,
            path,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            weight_type=QuantType.QInt8,
        )


def onnx_runner(
    source: Path | bytes, threads: int = 1, spin: bool = True
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from uint8 [B, 3, S, S] to logits [B, C]."""
    # `spin`: threads wait for work by spinning, which is faster on idle cores.
    session = open_session(source, threads, "--onnx", spin)
    return lambda image: session.run(None, {INPUT: image})[0]


def open_session(
    source: Path | bytes, threads: int, config_path: str, spin: bool = False
) -> Any:
    """Open a graph on the CPU."""
    runtime = import_package("onnxruntime", config_path)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if not spin:  # torch's threads use the cores too
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    model = source if isinstance(source, bytes) else str(source)
    try:
        return runtime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime has one exception type per kind of damage
        raise _graph_error(config_path, source, error) from error


def _graph_error(
    config_path: str, source: Path | bytes, error: Exception
) -> ModelError:
    name = "it" if isinstance(source, bytes) else f"'{source}'"
    return ModelError(
        config_path,
        f"{name} is no graph that onnxruntime can run ({first_sentence(error)})",
        "",
        "Export it anew",
    )


class Sessions:
    """Hold a graph's sessions, each with a fixed number of threads.

    A call uses torch's current number.
    """

    def __init__(self, start: Callable[[int], Any]) -> None:
        self._start = start
        self.open: dict[int, Any] = {}

    def __call__(self) -> Any:
        threads = torch.get_num_threads()
        if threads not in self.open:
            # two are kept: a measurement on one thread does not cost the run its
            # session
            previous = dict([*self.open.items()][-1:])
            self.open = {**previous, threads: self._start(threads)}
        return self.open[threads]


def graph_files(path: Path, config_path: str) -> list[Path]:
    """Return an ONNX file and its external weight files."""
    onnx = import_package("onnx", config_path)
    try:
        model = onnx.load(str(path), load_external_data=False)
        names = sorted(
            {
                entry.value
                for message in onnx_messages(model)
                for entry in getattr(message, "external_data", ())
                if entry.key == "location"
            }
        )
    # protobuf and onnx have one exception type per kind of damage
    except Exception as error:
        raise _graph_error(config_path, path, error) from error
    home = path.parent.resolve()
    files = [path]
    for name in names:
        file = path.parent / name
        outside = (
            "\0" in name
            or ".." in Path(name).parts
            or not file.resolve().is_relative_to(home)
        )
        if outside or not file.is_file():
            place = "outside its folder" if outside else "no regular file"
            wrong = f"'{path}' has weights in {name!r}, which is {place}"
            allowed = (
                "Regular files in the folder of the graph, by relative names, without"
                " links that leave it"
            )
            raise ModelError(
                config_path, wrong, allowed, "Put them there, or export it anew"
            )
        files.append(file)
    return files


def onnx_messages(message: Any) -> Iterator[Any]:
    """Yield an ONNX message and all messages within it.

    They are nodes, tensors, attributes, functions and subgraphs.
    """
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in [value] if hasattr(value, "DESCRIPTOR") else value:
                yield from onnx_messages(inner)


def openvino_runner(
    source: Path | bytes, threads: int = 0, bf16: bool = False
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from uint8 [B, 3, S, S] to float32 logits [B, C]."""
    # `threads` 0: OpenVINO's default. `bf16`: matrix products in bfloat16 instead of
    # float32.
    openvino = import_package("openvino", "--openvino", "openvino")
    options = {"INFERENCE_PRECISION_HINT": "bf16" if bf16 else "f32"}
    if bf16 and not has_bf16():
        wrong = "is bf16, but OpenVINO finds no bfloat16 units in this processor"
        raise ModelError(
            "teacher.precision", wrong, "auto or fp32", "Set teacher.precision=auto"
        )
    if threads:
        options["INFERENCE_NUM_THREADS"] = str(threads)
    with signal_stack():
        core = openvino.Core()
        compiled = core.compile_model(core.read_model(source), "CPU", options)
    return lambda image: next(iter(compiled(image).values()))


def has_bf16() -> bool:
    """Return whether OpenVINO is installed and finds bfloat16 units in this CPU."""
    if not installed("openvino"):
        return False
    with signal_stack():
        core = importlib.import_module("openvino").Core()
        return "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def import_package(name: str, option: str, extra: str = "") -> Any:
    """Import a package."""
    remedy = f"pip install {name}, or export with --no-onnx"
    if extra:
        remedy = f"pip install 'PATH/kd[{extra}]'"
    return import_optional(name, option, f"{name} is not installed", remedy)


def _export_error(tool: str, error: Exception) -> ModelError:
    return ModelError(
        "student.model",
        f"{tool} cannot express this network ({first_sentence(error)})",
        "",
        "Export with --no-onnx: timm and Hugging Face load that folder",
    )


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress the exporters' warnings about internals, which users cannot act on."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


class Exported(nn.Module):
    """Run a classifier as an exported graph in memory.

    It maps uint8 [B, 3, S, S] on the CPU to logits [B, C] only.
    """

    # The model is in eval mode, float32, on the CPU, without features. `precision`:
    # "fp32"; "int8" with onnxruntime (weights of matrix products quantized, inputs
    # dynamically); "bf16" with openvino. Takes seconds.

    classes = ()
    reads_ids = False

    def __init__(
        self, model: Classifier, size: int, runtime: str, precision: str = "fp32"
    ) -> None:
        super().__init__()
        self.runtime = runtime
        self.graph = exported(model, size, precision == "int8")
        start = partial(onnx_runner, self.graph, spin=False)
        if runtime == "openvino":
            start = partial(openvino_runner, self.graph, bf16=precision == "bf16")
        self.sessions = Sessions(start)

    def forward(self, image: Tensor) -> Outputs:
        return Outputs(torch.from_numpy(self.sessions()(image.contiguous().numpy())))


def exported(model: Classifier, size: int, int8: bool = False) -> bytes:
    """Return a classifier's ONNX file as bytes; temporary files are removed."""
    with tempfile.TemporaryDirectory(prefix="kd-") as folder:
        path = Path(folder) / "model.onnx"
        write_onnx(export_program(model, size), path)
        if int8:
            write_int8(path, path.with_suffix(".int8.onnx"))
            path = path.with_suffix(".int8.onnx")
        return path.read_bytes()


def median_cpu_ms(
    calls: Mapping[str, Callable[[], object]], seconds: float
) -> dict[str, float]:
    """Return each call's median CPU ms on one thread.

    Calls are timed in turns: 30 rounds, or 4 and `seconds`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        milliseconds: dict[str, list[float]] = {name: [] for name in calls}
        begin = time.perf_counter()
        for turn in range(ROUNDS + 2):
            for name, call in calls.items():
                start = time.process_time()
                call()
                if turn >= 2:
                    milliseconds[name].append(1000 * (time.process_time() - start))
            if turn > 4 and time.perf_counter() - begin > seconds:
                break
    finally:
        torch.set_num_threads(threads)
    return {name: statistics.median(times) for name, times in milliseconds.items()}
