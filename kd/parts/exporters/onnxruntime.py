"""ONNX files for onnxruntime: float32, and int8 with dynamic quantization."""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from kd.core.errors import ModelError, import_optional
from kd.core.facts import ExporterFacts, GraphFile, Network
from kd.core.facts import NoOptions as Options
from kd.core.host import installed
from kd.parts.exporters._exporter import Engine, Exporter

facts = ExporterFacts(
    graphs={
        "model.onnx": GraphFile(runtime="onnxruntime", precision="float32", cost=1),
        "model.int8.onnx": GraphFile(
            runtime="onnxruntime", precision="int8", option="--int8", cost=3
        ),
    }
)


OWN_METADATA = re.compile(r"namespace|onnx\.infer|pkg\.(torch|onnxscript)\..*")
"""Keys of the metadata that torch 2.14, onnxscript 0.7 and onnxruntime 1.32 write."""


# names of ONNX's types in `GraphFile.precision`, where they differ
TYPES = {"float": "float32", "uint8": "int8"}


class ONNX(Exporter):
    """See `kd.models.runtimes`, which also runs teachers as such graphs."""

    runtime = "onnxruntime"
    oldest = ((10, 21, "1.20"), (10, 22, "1.21"), (11, 23, "1.23"), (13, 25, "1.24"))

    def missing(self, file: str, write: bool) -> str:
        for name in (("onnx", "onnxscript") if write else ()) + ("onnxruntime",):
            if not installed(name):
                return (
                    f"{name} is not installed: pip install {name}, or export with"
                    " --no-onnx"
                )
        return ""

    def write(self, path: Path, network: Network) -> None:
        from kd.models import runtimes

        if path.name == "model.onnx":
            runtimes.write_onnx(network.program(0), path, network.output)
        else:
            runtimes.write_int8(network.onnx, path)

    def load(
        self, file: str, content: bytes, weights: bytes, threads: int, slots: int
    ) -> Engine:
        runtime = import_optional(
            "onnxruntime",
            "export",
            "onnxruntime is not installed",
            "pip install onnxruntime",
        )
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # A spinning thread would take CPU time from decoding other images.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        session = runtime.InferenceSession(
            content, options, providers=["CPUExecutionProvider"]
        )
        return lambda pixels: session.run(None, {"image": pixels})[0]

    def format_versions(self, path: Path) -> tuple[int, int]:
        _, model = _read_model(path)
        opsets = [opset.version for opset in model.opset_import if not opset.domain]
        return model.ir_version, max(opsets)

    def metadata(self, path: Path) -> dict[str, str]:
        from kd.models.runtimes import onnx_messages

        _, model = _read_model(path)
        texts: dict[str, str] = {}
        for message in onnx_messages(model):
            texts |= {
                pair.key: pair.value for pair in getattr(message, "metadata_props", ())
            }
            if text := getattr(message, "doc_string", ""):
                texts["doc_string"] = text
        return {
            key: text for key, text in texts.items() if not OWN_METADATA.fullmatch(key)
        }

    def precision(self, path: Path, claimed: str) -> str:
        types = self.weight_counts(path).keys()
        return "int8" if "int8" in types else ", ".join(sorted(types)) or "float32"

    def weight_counts(self, path: Path) -> dict[str, int]:
        onnx, model = _read_model(path)
        counts: Counter[str] = Counter()
        for array in model.graph.initializer:
            name = str(onnx.TensorProto.DataType.Name(array.data_type)).lower()
            # indices and masks of attention are no weights
            if len(array.dims) > 1 and name not in ("int64", "int32", "bool"):
                counts[TYPES.get(name) or name] += math.prod(array.dims)
        return counts


def _read_model(path: Path) -> tuple[Any, Any]:
    """Return the onnx package and the model of a file, without external weights."""
    onnx = import_optional(
        "onnx", "export", "onnx is not installed", "pip install onnx"
    )
    try:
        return onnx, onnx.load(path, load_external_data=False)
    # protobuf and onnx have one exception type per kind of damage
    except Exception as error:
        raise ModelError(
            f"export.{path.name}", "is no graph", "", "Do not serve it"
        ) from error


def build(options: Options) -> ONNX:
    """Return the exporter."""
    return ONNX()
