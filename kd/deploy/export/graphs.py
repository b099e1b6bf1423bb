"""The graphs of an export, each compared with PyTorch before it is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kd.core.errors import ConfigError
from kd.core.evaluation import Task
from kd.deploy.export import defer, int8, parity, variants
from kd.deploy.export.defer import Rule
from kd.deploy.export.parity import EAGER
from kd.deploy.export.subject import Images, Options, Subject
from kd.deploy.export.variants import ONNX, Quality
from kd.models import runtimes
from kd.models.classifier import Classifier

CALIBRATION_IMAGES = 1000
INT8, OPENVINO, PT2 = int8.DYNAMIC, "openvino.xml", "model.pt2"
BF16 = "openvino.bf16.xml"
EXACT = (ONNX, OPENVINO, PT2)  # what must compute what PyTorch computes. The others may lose a little.


@dataclass(slots=True)
class Made:
    """What was written and measured."""

    parity: dict[str, dict[str, Any]] = field(default_factory=dict)
    eager_ms: float = 0.0
    lines: list[str] = field(default_factory=list)
    thresholds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By class, where each is answered alone: see `kd.core.evaluation.Task.thresholds`."""
    defer: dict[str, Any] = field(default_factory=dict)
    """When it is not sure: see `kd.deploy.export.defer.choose`; empty: it does not say."""
    calibration: dict[str, Any] = field(default_factory=dict)
    """What `parity.calibrate` found; empty: the logits are those of the run."""
    qualities: dict[str, Quality] = field(default_factory=dict)
    """Of each file that an endpoint can serve, where they are compared."""
    image: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    """The first of those with which they were compared, uint8 [3, S, S]."""
    rungs: list[int8.Rung] = field(default_factory=list)  # of the ladder to int8, those that were tried
    validation: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each graph answered on validation images: see `kd.deploy.shift.Reference`."""


def write(subject: Subject, folder: Path, options: Options) -> Made:
    """Write the graphs that the options name and compare each with PyTorch. Calibrating changes the last layer."""
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
        size = subject.recipe.data.section.image_size
        runners = _write(folder, student, size, options)
        rungs = _quantized(subject, folder, images, options)
        names = [name for name in (INT8, int8.STATIC) if (folder / name).is_file()]
        runners |= {name: variants.Variant.at(folder / name).runner() for name in names}
        answers = parity.compare(student, runners, images(options.images))
    made = Made(eager_ms=answers.cpu_ms[EAGER], calibration=calibration, image=answers.first, rungs=rungs)
    made.thresholds = task.thresholds(answers.outputs[EAGER], answers.labels, classes)
    for name in runners:
        made.parity[name], line = _accepted(name, answers, task, options)
        made.validation[name] = answers.reference(name, task, classes, bool(calibration)).record()
        size = sum(path.stat().st_size for path in variants.files(folder / name))
        made.lines.append(f"{name:16s} {size / 1e6:6.2f} MB  {line} (PyTorch {made.eager_ms:.2f})")
        if options.compare and name != PT2:
            made.qualities[name] = variants.quality(name, answers, task)
    made.lines += [rung.line() for rung in rungs] + ([calibrated] if calibrated else [])
    made.lines += _left_out() if options.compare else []
    made.defer = defer.choose(rule, answers.outputs, answers.labels, made.thresholds, classes)
    made.lines += defer.lines_of(made.defer)
    return made


def _accepted(name: str, answers: parity.GraphOutputs, task: Task, options: Options) -> tuple[dict[str, Any], str]:
    """Return what is recorded of a graph, and a line about it."""
    scores, difference, images = answers.scores(name, task), answers.difference(name), len(answers.labels)
    what = f"max |d{'logit' if task.logits else 'value'}| {difference:.1e}"
    if name in EXACT:
        parity.check_exact(name, scores, difference, options.tolerance, images)
    rounded = {"max_difference": float(f"{difference:.3g}"), "cpu_ms": round(answers.cpu_ms[name], 3)}
    line = f"{what}, {scores.summary}, {answers.cpu_ms[name]:.2f} ms CPU an image"
    return {"images": images, **scores.facts, **rounded}, line


def _write(folder: Path, student: Classifier, size: int, options: Options) -> dict[str, parity.Runner]:
    """Write the graphs and return a function that runs each, by file name."""
    runners: dict[str, parity.Runner] = {}
    program = runtimes.export_program(runtimes.reparameterized(student), size)
    if options.pt2:
        torch.export.save(program, folder / PT2)
        runners[PT2] = runtimes.program_runner(folder / PT2)
    names = []
    if options.onnx:
        runtimes.write_onnx(program, folder / ONNX, runtimes.LOGITS if student.num_classes else runtimes.EMBEDDING)
        names.append(ONNX)
    if options.openvino or (options.compare and runtimes.installed("openvino")):
        runtimes.write_openvino(folder / ONNX, folder / OPENVINO)
        names.append(OPENVINO)
    if options.compare and runtimes.has_bf16():
        runtimes.write_openvino(folder / ONNX, folder / BF16, half=True)
        names.append(BF16)
    return {**runners, **{name: variants.Variant.at(folder / name).runner() for name in names}}


def _quantized(subject: Subject, folder: Path, images: Images, options: Options) -> list[int8.Rung]:
    """Write the int8 graphs that are asked for; return what was tried, where one of them must hold."""
    nncf = all(runtimes.installed(name) for name in ("nncf", "openvino"))
    views = partial(images, training=True)
    if options.int8:
        exam = int8.Exam.of(subject.recipe.student.task, subject.student, partial(images, options.images))
        return int8.climb(folder, exam, views, options.max_drop, both=options.compare and nncf)
    if options.compare:
        runtimes.write_int8(folder / ONNX, folder / INT8)
        if nncf:
            int8.post_training(folder / ONNX, folder / int8.STATIC, views)
    return []


def _left_out() -> list[str]:
    """Return a line for each group of variants that this machine cannot run."""
    if not runtimes.installed("openvino"):
        return ["left out: OpenVINO's variants, because openvino is not installed: pip install 'kd[openvino]'"]
    lines = []
    if not runtimes.has_bf16():
        lines.append(f"left out: {BF16}, because OpenVINO finds no bfloat16 units in this processor")
    if not runtimes.installed("nncf"):
        lines.append(f"left out: {int8.STATIC}, because nncf is not installed: pip install 'kd[nncf]'")
    return lines
