"""What a person may ask of an export. `kd-export` makes its flags of these fields, and their help of these texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kd.core.errors import ConfigError
from kd.core.host import cores
from kd.core.options import option, positive, whole_number
from kd.deploy.export.accept import EXAMPLE, limits, sentence

if TYPE_CHECKING:  # they import torch, and `kd-export --help` needs none
    from kd.core.evaluation import Task
    from kd.deploy.export.defer import Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Which graphs are written beside the folder that timm loads, how each is compared, and which one is served."""

    onnx: bool = option(True)
    """write model.onnx; without it and --pt2 no images are read"""
    int8: bool = option(False)
    """also model.int8.onnx: int8 weights, activations quantized as they come"""
    openvino: bool = option(False)
    """also openvino.xml; needs kd[openvino]"""
    pt2: bool = option(False)
    """also model.pt2 for torch.export.load"""
    index: bool = option(False)
    """of an embedding student: vectors in its teacher's space, to be searched in the teacher's index"""
    tolerance: float = option(1e-3, "X", positive)
    """logits of float32 graphs may differ by this much"""
    images: int = option(2000, "N", whole_number(0, 10**9))
    """validation images compared, evenly spaced; 0: all"""
    compare: bool = option(False)
    """write every graph that runs here and measure each, by kd-serve"""
    accept: str | None = option(None, "SENTENCE", sentence)
    """"drop<=2 ms<=5 mb<=4", also teacher-drop and ece: write the first graph that keeps it, or exit with code 3"""
    threads: int = option(1, "N", whole_number(1, 4096))
    """on which an image is computed for `ms` (default 1)"""
    calibrate: bool = option(True)
    """divide the logits by one temperature, fitted on validation images, where that makes confidences better"""
    defer: float = option(0.0, "X", float)
    """say which answers are sure: at most this share of them wrong, such as 0.02 (default: none)"""
    defer_share: float = option(0.0, "X", float)
    """instead: this share of images is unsure (default: none)"""
    license: str = option("", "ID")
    """licence to state in the model card, e.g. apache-2.0"""

    @property
    def any_graph(self) -> bool:
        return self.onnx or self.pt2

    @property
    def measures(self) -> bool:
        return self.compare or self.accept is not None

    @property
    def rule(self) -> Rule:
        from kd.deploy.export.defer import Rule

        return Rule(self.defer, self.defer_share)

    def require(self, task: Task) -> None:
        """Refuse what does not go together, before minutes of work."""
        if not self.onnx and (self.int8 or self.openvino or self.measures):
            raise ConfigError("--no-onnx", "all other graphs are made from model.onnx", "", "Leave out --no-onnx")
        if self.measures and not 1 <= self.threads <= cores():
            allowed = f"1 to {cores()}, which this process may use"
            raise ConfigError("--threads", f"is {self.threads}", allowed, "Measure where the endpoint will run")
        if self.accept is not None:
            try:
                wanted = limits(self.accept)
            except ValueError as error:
                raise ConfigError("--accept", str(error), "", f"Say it {EXAMPLE}") from error
            if "ece" in wanted and task.logits != "softmax":
                wrong = "ece is of answers with one class, and this student gives others"
                raise ConfigError("--accept", wrong, "", "Leave ece out")
        if self.index and task.logits:
            wrong = "this student answers with classes, not with vectors"
            raise ConfigError("--index", wrong, "A run whose losses are all on features", "Leave out --index")
        if self.index and not self.any_graph:
            wrong = "maps the vectors in the graphs, and with --no-onnx there is none"
            raise ConfigError("--index", wrong, "", "Leave out --no-onnx")
        self.rule.check(task, self.any_graph)
