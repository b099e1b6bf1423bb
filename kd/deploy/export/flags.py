"""The options of an export: `kd-export` takes its flags and their help from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.core.errors import ConfigError, ModelError, did_you_mean
from kd.core.host import cores
from kd.core.options import option, parse_positive, whole_number
from kd.parts import registry

if TYPE_CHECKING:  # they import torch, and `kd-export --help` needs none
    from kd.core.evaluation import Task
    from kd.deploy.export.defer import Rule

HIGHEST = {"drop": 100.0, "teacher-drop": 100.0, "ece": 100.0, "ms": 1e6, "mb": 1e6}
"""The words of `--accept` and their largest numbers: points of 100, a quarter of an
hour, a terabyte.
"""
EXAMPLE = 'such as "drop<=2 ms<=5 mb<=4"'


class NotAcceptedError(ModelError):
    """No graph is within the limits of `--accept`."""

    exit_code = 3


def parse_limits(sentence: str) -> dict[str, float]:
    """Parse limits into {word: largest number}; ValueError: anything else."""
    limits: dict[str, float] = {}
    for term in sentence.split():
        match = re.fullmatch(r"([a-z-]+)<=([0-9]{1,9}(?:\.[0-9]{1,9})?)", term)
        if match is None:
            raise ValueError(f"'{term}' is not WORD<=NUMBER, {EXAMPLE}")
        word = match[1]
        limit = float(match[2])
        if word not in HIGHEST:
            wrong = f"'{word}' is not one of {', '.join(HIGHEST)}"
            hint = did_you_mean(word, HIGHEST)
            raise ValueError(f"{wrong}. {hint}" if hint else wrong)
        if limit > HIGHEST[word] or (word in ("ms", "mb") and not limit):
            raise ValueError(
                f"'{term}' is out of range: {word} is at most {HIGHEST[word]:g}"
            )
        if word in limits:
            raise ValueError(f"'{word}' is repeated")
        limits[word] = limit
    if not limits:
        raise ValueError("is empty")
    return limits


def normalized_limits(sentence: str) -> str:
    """Return limits with normalized spaces; ValueError: they are malformed."""
    parse_limits(sentence)
    return " ".join(sentence.split())


def missed_limits(
    values: Mapping[str, float], limits: Mapping[str, float]
) -> list[str]:
    """Describe by how much a measured value misses its limit."""
    return [
        f"{word} by {values[word] - limit:.3g} ({values[word]:.4g})"
        for word, limit in limits.items()
        if word in values and not values[word] <= limit  # true for NaN
    ]


def accepted_line(accepted: Mapping[str, Any]) -> str:
    """Return the accepted limits as text."""
    values = ", ".join(
        f"{word} {value:.4g}" for word, value in accepted["found"].items()
    )
    second = ""
    caveat = ""
    if "second" in accepted:
        second = f" and, for unsure images, {accepted['second']}"
        caveat = "; the share was chosen by these images too, which flatters it"
    return (
        f'accepted "{accepted["sentence"]}": {accepted["file"]}{second} with {values},'
        f" on {accepted['threads']} threads{caveat}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Which graphs an export has, how they are compared, and which one is served."""

    onnx: bool = option(True)
    """write model.onnx; without it and --pt2 no images are read"""
    int8: bool = option(False)
    """also model.int8.onnx: int8 weights, dynamic int8 quantization"""
    openvino: bool = option(False)
    """also openvino.xml; needs kd[openvino]"""
    pt2: bool = option(False)
    """also model.pt2 for torch.export.load"""
    formats: str = option("", "NAME,...")
    """also the graphs of these exporters, such as executorch; `kd-parts exporters` has
    all
    """
    index: bool = option(False)
    """for an embedding student: embeddings searchable in an existing teacher index"""
    tolerance: float = option(1e-3, "X", parse_positive)
    """largest difference of a float32 graph's logits"""
    images: int = option(2000, "N", whole_number(0, 10**9))
    """validation images compared, evenly spaced; 0: all"""
    compare: bool = option(False)
    """write every graph that runs here and measure each through kd-serve"""
    accept: str | None = option(None, "LIMITS", normalized_limits)
    """limits such as "drop<=2 ms<=5 mb<=4", also teacher-drop and ece, drops in points:
    write the first graph within them all, else exit with code 3
    """
    second: Path | None = option(None, "EXPORT", Path)
    """if no graph is within the limits of --accept, try each with this export for its
    unsure images
    """
    threads: int = option(1, "N", whole_number(1, 4096))
    """threads for measuring `ms` (default 1)"""
    calibrate: bool = option(True)
    """divide the logits by one temperature, fitted on validation images, if that
    improves the confidences
    """
    defer: float = option(0.0, "X", float)
    """mark sure predictions, of which at most this share is wrong, such as 0.02
    (default: no marks)
    """
    defer_share: float = option(0.0, "X", float)
    """instead mark this share of images as unsure (default: no marks)"""
    values: Path | None = option(None, "FILE", Path)
    """CSV file: what responses say beside a label, such as kcal (default: as in
    the export that is replaced)
    """
    license: str = option("", "ID")
    """licence to state in the model card, e.g. apache-2.0"""
    sign: Path | None = option(None, "KEY", Path)
    """sign the export with this private key (PEM); needs kd[sign]"""

    @property
    def any_graph(self) -> bool:
        return self.onnx or self.pt2 or bool(self.formats)

    def wants(self, file: str) -> bool:
        """Return whether a flag names a graph."""
        graph = registry.graphs()[file]
        flag = {
            "": self.onnx,
            "--int8": self.int8,
            "--openvino": self.openvino,
            "--pt2": self.pt2,
        }.get(graph.option)
        return bool(flag) or graph.kind in self.formats.split(",")

    @property
    def measures(self) -> bool:
        return self.compare or self.accept is not None

    @property
    def rule(self) -> Rule:
        from kd.deploy.export.defer import Rule

        return Rule(self.defer, self.defer_share)

    def require(self, task: Task) -> None:
        """Refuse incompatible options before minutes of work."""
        for name in filter(None, self.formats.split(",")):
            registry.find("exporters", name, "--formats")
            exporters = registry.names("exporters")
            if name not in exporters:  # a module of the user, which writes nothing
                wrong = f"'{name}' lies outside kd/parts/exporters"
                raise ConfigError("--formats", wrong, f"One of: {', '.join(exporters)}")
        if not self.onnx and (self.int8 or self.openvino or self.measures):
            wrong = "all other graphs are made from model.onnx"
            raise ConfigError("--no-onnx", wrong, "", "Leave out --no-onnx")
        if self.measures and not 1 <= self.threads <= cores():
            allowed = f"1 to {cores()}, which this process may use"
            remedy = "Measure where the endpoint will run"
            raise ConfigError("--threads", f"is {self.threads}", allowed, remedy)
        if self.accept is not None:
            try:
                limits = parse_limits(self.accept)
            except ValueError as error:
                remedy = f"Say it {EXAMPLE}"
                raise ConfigError("--accept", str(error), "", remedy) from error
            if "ece" in limits and task.logits != "softmax":
                wrong = "ece needs a student with one class per image"
                raise ConfigError("--accept", wrong, "", "Leave ece out")
        if self.index and task.logits:
            wrong = "this student returns classes, not vectors"
            allowed = "A run whose losses are all on features"
            raise ConfigError("--index", wrong, allowed, "Leave out --index")
        if self.index and not self.any_graph:
            wrong = "is applied inside the graphs, and --no-onnx writes no graph"
            raise ConfigError("--index", wrong, "", "Leave out --no-onnx")
        self.rule.check(task, self.any_graph)
