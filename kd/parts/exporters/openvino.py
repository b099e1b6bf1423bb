"""OpenVINO's IR: float32, bfloat16 if the processor has units for it, and int8 by
SmoothQuant with NNCF.
"""

import io
import itertools
import logging
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from kd.core.errors import import_optional
from kd.core.facts import ExporterFacts, GraphFile, Network
from kd.core.facts import NoOptions as Options
from kd.core.host import installed, signal_stack
from kd.parts.exporters._exporter import Engine, Exporter

OPENVINO = "openvino.xml"
BF16 = "openvino.bf16.xml"  # if the processor has units for it
STATIC = "openvino.int8.xml"
# names of weight types in `GraphFile.precision`
TYPES = {"f32": "float32", "f16": "bf16", "i8": "int8", "u8": "int8"}
OWN_METADATA = re.compile(
    "rt_info|info|Runtime_version|conversion_parameters|input_model|is_python_object|nncf|friendly_names_were_updated|"
    "quantization|advanced_parameters|fast_bias_correction|ignored_scope|model_type|preset|subset_size|target_device|"
    "version"
)
"""Elements behind the graph that OpenVINO 2026.4 and NNCF 3.4 write."""
VIEWS = 300
"""Training views for NNCF's calibration: its own default. With SmoothQuant, two ViTs
with planted outliers lost 0.0 and 0.65 points of 40 (int8_planted in benchmarks/ at
commit 443d35d4).
"""
facts = ExporterFacts(
    graphs={
        OPENVINO: GraphFile(
            "openvino", "float32", option="--openvino", weights="openvino.bin", cost=2
        ),
        BF16: GraphFile(
            "openvino", "bf16", option="--compare", weights="openvino.bf16.bin", cost=4
        ),
        STATIC: GraphFile(
            "openvino",
            "int8",
            option="--compare",
            weights="openvino.int8.bin",
            integer=True,
            cost=5,
        ),
    }
)


class OpenVINO(Exporter):
    """Quantize by SmoothQuant (arXiv:2211.10438) and bias correction (NNCF)."""

    runtime = "openvino"
    oldest = ((11, 15, "2024.5"),)

    def missing(self, file: str, write: bool) -> str:
        from kd.models.runtimes import has_bf16

        if not installed("openvino"):
            return "openvino is not installed: pip install 'PATH/kd[openvino]'"
        if file == BF16 and not has_bf16():
            return "OpenVINO finds no bfloat16 units in this processor"
        if file == STATIC and write and not installed("nncf"):
            return "nncf is not installed: pip install 'PATH/kd[nncf]'"
        return ""

    def write(self, path: Path, network: Network) -> None:
        from kd.models.runtimes import without_warnings

        if path.name == STATIC:
            return post_training(network.onnx, path, network.views)
        openvino = _import("--openvino")
        with without_warnings():
            openvino.save_model(
                openvino.convert_model(str(network.onnx)),
                str(path),
                compress_to_fp16=path.name == BF16,
            )

    def load(
        self, file: str, content: bytes, weights: bytes, threads: int, slots: int
    ) -> Engine:
        openvino = _import("export")
        settings = {
            # the precision that kd-export compared with PyTorch, not OpenVINO's choice
            # here
            "INFERENCE_PRECISION_HINT": "bf16" if file == BF16 else "f32",
            "NUM_STREAMS": str(slots),
            "INFERENCE_NUM_THREADS": str(threads * slots),
        }
        with signal_stack():
            core = openvino.Core()
            compiled = core.compile_model(
                core.read_model(content, weights), "CPU", settings
            )
        local = threading.local()
        first_inference = threading.Lock()

        def run(pixels: np.ndarray) -> np.ndarray:
            # The first inference of each thread must end before the next thread's
            # begins: two at once deadlocked, one holding a guard of OpenVINO's C++ code
            # and waiting for Python's lock, the other the reverse.
            if not hasattr(local, "request"):
                with first_inference:
                    request = compiled.create_infer_request()
                    request.infer({0: pixels})
                local.request = request
            outputs = local.request.infer({0: pixels})
            return next(iter(outputs.values())).copy()

        return run

    def format_versions(self, path: Path) -> tuple[int, int]:
        """Return the version of the IR and the highest opset; 0 for a missing one."""
        content = path.read_bytes()
        ir = re.search(rb'<net [^>]*version="(\d+)"', content)
        ir_version = int(ir[1]) if ir else 0
        opsets = re.findall(rb'version="opset(\d+)"', content)
        return ir_version, max(map(int, opsets), default=0)

    def metadata(self, path: Path) -> dict[str, str]:
        info = path.read_text("utf-8", "replace").rpartition("</edges>")[2]
        return {
            name: text
            for name, text in re.findall(r"<([\w!-]+)([^>]*)>", info)
            if not OWN_METADATA.fullmatch(name)
        }

    def precision(self, path: Path, claimed: str) -> str:
        """Return int8 if any weights are int8, else the most frequent type."""
        counts = self.weight_counts(path)
        if counts["int8"]:
            return "int8"
        return max(counts, key=counts.__getitem__, default="no weights")

    def weight_counts(self, path: Path) -> Counter[str]:
        counts: Counter[str] = Counter()
        for name, shape in re.findall(
            r'element_type="(\w+)" shape="([\d, ]*,[\d, ]*)"',
            path.read_text("utf-8", "replace"),
        ):
            if name in TYPES:
                counts[TYPES[name]] += math.prod(map(int, shape.split(",")))
        return counts


def _import(config_path: str) -> Any:
    remedy = "pip install 'PATH/kd[openvino]', or choose --file model.onnx"
    return import_optional("openvino", config_path, "openvino is not installed", remedy)


def post_training(source: Path, path: Path, views: Any) -> None:
    """Write OpenVINO's IR, `path` (.xml) and its .bin, quantized to int8."""
    with _nncf() as nncf:
        openvino = _import("--int8")
        # NNCF's statistics are per image
        pixels = (image[None] for batch, *_ in views(VIEWS) for image in batch)
        quantized = nncf.quantize(
            openvino.convert_model(str(source)),
            nncf.Dataset(list(itertools.islice(pixels, VIEWS))),
            model_type=nncf.ModelType.TRANSFORMER,
            target_device=nncf.TargetDevice.CPU,
            subset_size=VIEWS,
        )
        openvino.save_model(quantized, str(path), compress_to_fp16=False)


@contextmanager
def _nncf() -> Iterator[Any]:
    """Import NNCF and suppress its progress bars and log, which users cannot act on."""
    from kd.models.runtimes import without_warnings

    # nothing is sent to Intel: NNCF's telemetry is off
    os.environ.setdefault("NNCF_CI", "1")
    level = logging.getLogger("nncf").level
    with signal_stack(), without_warnings(), redirect_stdout(io.StringIO()):
        yield import_optional(
            "nncf", "--int8", "nncf is not installed", "pip install 'PATH/kd[nncf]'"
        )
    logging.getLogger("nncf").setLevel(level)


def build(options: Options) -> OpenVINO:
    """Return the exporter."""
    return OpenVINO()
