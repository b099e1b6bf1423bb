"""A laboratory's format: model.onnx, compressed, for `kd-export --formats packed`."""

import zlib

from kd.core.facts import ExporterFacts, GraphFile
from kd.core.facts import NoOptions as Options
from kd.parts import registry
from kd.parts.exporters._exporter import Exporter

GRAPH = GraphFile(
    "onnxruntime", "float32", option="--formats packed", cost=9, named=True
)
facts = ExporterFacts(graphs={"model.packed": GRAPH})


class Packed(Exporter):
    """Unpacked in memory, and run by onnxruntime."""

    runtime = "onnxruntime"

    def write(self, path, network):
        path.write_bytes(zlib.compress(network.onnx.read_bytes()))

    def load(self, file, content, weights, threads, slots):
        onnx = registry.exporter("model.onnx")
        return onnx.load("model.onnx", zlib.decompress(content), b"", threads, slots)


def build(options: Options) -> Packed:
    return Packed()
