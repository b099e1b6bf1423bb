"""The graphs of an export, each compared with PyTorch before it is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kd.errors import ConfigError
from kd.evaluation import Task
from kd.export import defer, parity, variants
from kd.export.defer import Rule
from kd.export.parity import EAGER
from kd.export.variants import Quality
from kd.models import runtimes
from kd.models.classifier import Classifier

if TYPE_CHECKING:
    from kd.export.export import Options, Subject

CALIBRATION_IMAGES = 1000
ONNX, INT8, OPENVINO, PT2 = "model.onnx", "model.int8.onnx", "openvino.xml", "model.pt2"
BF16 = "openvino.bf16.xml"
EXACT = (ONNX, OPENVINO, PT2)
"""What must compute what PyTorch computes. The others may lose a little."""


@dataclass(slots=True)
class Made:
    """What was written and measured."""

    parity: dict[str, dict[str, Any]] = field(default_factory=dict)
    eager_ms: float = 0.0
    lines: list[str] = field(default_factory=list)
    thresholds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By class, where each is answered alone: see `kd.evaluation.Task.thresholds`."""
    defer: dict[str, Any] = field(default_factory=dict)
    """When it is not sure: see `kd.export.defer.choose`; empty: it does not say."""
    calibration: dict[str, Any] = field(default_factory=dict)
    """What `parity.calibrate` found; empty: the logits are those of the run."""
    qualities: dict[str, Quality] = field(default_factory=dict)
    """Of each file that an endpoint can serve, where they are compared."""
    image: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    """The first of those with which they were compared, uint8 [3, S, S]."""


def write(subject: Subject, folder: Path, options: Options) -> Made:
    """Write the graphs that the options name and compare each with PyTorch. Calibrating changes the last layer.

    Raises:
        RunError: the data is not that of the run.
        ModelError: a graph does not answer as PyTorch does.
        MissingExtra: a package that an option needs.
    """
    if not options.onnx and (options.int8 or options.openvino or options.compare):
        raise ConfigError("--no-onnx", "all other graphs are made from model.onnx", "", "Leave out --no-onnx")
    task, student, classes = subject.recipe.student.task, subject.student, subject.classes
    rule = Rule(options.defer, options.defer_share)
    rule.check(task, options.onnx or options.pt2)
    if not options.onnx and not options.pt2:
        none = torch.zeros(0, len(classes))
        return Made(thresholds=task.thresholds(none, task.no_labels(0, len(classes)), classes))
    if options.onnx:  # before the images are read
        for name in ("onnx", "onnxscript", "onnxruntime"):
            runtimes.require(name, "--onnx")
    student.eval()
    calibration, calibrated = {}, ""
    with subject.images() as images:
        if options.calibrate and task.logits == "softmax":
            few = min(options.images or CALIBRATION_IMAGES, CALIBRATION_IMAGES)
            calibration, calibrated = parity.calibrate(student, images(few))
        runners = _write(folder, student, subject.recipe.data.section.image_size, options)
        answers = parity.compare(student, runners, images(options.images))
    made = Made(eager_ms=answers.cpu_ms[EAGER], calibration=calibration, image=answers.first)
    made.thresholds = task.thresholds(answers.outputs[EAGER], answers.labels, classes)
    for name in runners:
        made.parity[name], line = _accepted(name, answers, task, options)
        size = sum(path.stat().st_size for path in variants.files(folder / name))
        made.lines.append(f"{name:16s} {size / 1e6:6.2f} MB  {line} (PyTorch {made.eager_ms:.2f})")
        if options.compare and name != PT2:
            made.qualities[name] = variants.quality(name, answers, task)
    made.lines += [calibrated] if calibrated else []
    made.lines += _left_out() if options.compare else []
    made.defer = defer.choose(rule, answers.outputs, answers.labels, made.thresholds, classes)
    made.lines += defer.lines_of(made.defer)
    return made


def _accepted(name: str, answers: parity.Answers, task: Task, options: Options) -> tuple[dict[str, Any], str]:
    """Return what is recorded of a graph, and a line about it.

    Raises:
        ModelError: an exact graph does not answer as PyTorch does, or an approximate one loses too much; where all are
            compared, such a one stays in the table.
    """
    scores, difference, images = answers.scores(name, task), answers.difference(name), len(answers.labels)
    what = f"max |d{'logit' if task.logits else 'value'}| {difference:.1e}"
    if name in EXACT:
        parity.check_exact(name, scores, difference, options.tolerance, images)
    elif not options.compare:
        what += parity.check_drop(name, scores, answers.scores(EAGER, task), options.max_drop, images)
    rounded = {"max_difference": float(f"{difference:.3g}"), "cpu_ms": round(answers.cpu_ms[name], 3)}
    line = f"{what}, {scores.summary}, {answers.cpu_ms[name]:.2f} ms CPU an image"
    return {"images": images, **scores.facts, **rounded}, line


def _write(folder: Path, student: Classifier, size: int, options: Options) -> dict[str, parity.Runner]:
    """Write the graphs and return a function that runs each, by file name."""
    runners: dict[str, parity.Runner] = {}
    program = runtimes.export_program(runtimes.reparameterized(student), size)
    if options.pt2:
        runtimes.write_program(program, folder / PT2)
        runners[PT2] = runtimes.program_runner(folder / PT2)
    names = []
    if options.onnx:
        runtimes.write_onnx(program, folder / ONNX, runtimes.LOGITS if student.num_classes else runtimes.EMBEDDING)
        names.append(ONNX)
    if options.int8 or options.compare:
        runtimes.write_int8(folder / ONNX, folder / INT8)
        names.append(INT8)
    if options.openvino or (options.compare and runtimes.installed("openvino")):
        runtimes.write_openvino(folder / ONNX, folder / OPENVINO)
        names.append(OPENVINO)
    if options.compare and runtimes.has_bf16():
        runtimes.write_openvino(folder / ONNX, folder / BF16, half=True)
        names.append(BF16)
    return {**runners, **{name: variants.Variant.at(folder / name).runner() for name in names}}


def _left_out() -> list[str]:
    """Return a line for each group of variants that this machine cannot run."""
    if not runtimes.installed("openvino"):
        return ["left out: OpenVINO's variants, because openvino is not installed: pip install 'kd[openvino]'"]
    if not runtimes.has_bf16():
        return [f"left out: {BF16}, because OpenVINO finds no bfloat16 units in this processor"]
    return []
