"""The graphs of an export, each compared with PyTorch before it is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kd.deploy.export import defer, int8, parity, variants
from kd.deploy.export.calibrate import calibrate
from kd.deploy.export.options import ExportOptions
from kd.deploy.export.parity import EAGER, GraphOutputs
from kd.deploy.export.subject import ReadImages, Subject
from kd.deploy.export.variants import ONNX, Quality, Variant
from kd.models import runtimes
from kd.models.classifier import Classifier

CALIBRATION_IMAGES = 1000
"""At most, for one temperature: the interval of a single number narrows with the root of the images only, while the
time to ask PyTorch grows with the images."""
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
    """What `calibrate` found; empty: the logits are those of the run."""
    qualities: dict[str, Quality] = field(default_factory=dict)
    """Of each file that an endpoint can serve, where they are measured."""
    image: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    """The first of those with which they were compared, uint8 [3, S, S]."""
    rungs: list[int8.Rung] = field(default_factory=list)  # ways to int8 that were tried
    validation: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each graph answered on validation images: see `kd.deploy.shift.Reference`."""


def write(subject: Subject, folder: Path, options: ExportOptions) -> Made:
    """Write the graphs that the options name and compare each with PyTorch. Calibrating changes the last layer."""
    task, student, classes = subject.recipe.student.task, subject.student, subject.classes
    if not options.graphs.any:
        none = torch.zeros(0, len(classes))
        return Made(thresholds=task.thresholds(none, task.no_labels(0, len(classes)), classes))
    if options.graphs.onnx:  # before the images are read
        for name in ("onnx", "onnxscript", "onnxruntime"):
            runtimes.require(name, "--onnx")
    student.eval()
    made, notes = Made(), []
    with subject.images() as images:
        if options.sure.calibrate and task.logits == "softmax":
            few = min(options.check.images or CALIBRATION_IMAGES, CALIBRATION_IMAGES)
            made.calibration, line = calibrate(student, images(few))
            notes.append(line)
        runners = _write_float(folder, student, subject.recipe.data.image_size, options)
        made.rungs, failed = _write_int8(subject, folder, images, options)
        written = [name for name in (INT8, int8.STATIC) if (folder / name).is_file()]
        runners |= {name: Variant.at(folder / name).runner() for name in written}
        outputs = parity.compare(student, runners, images(options.check.images))
    made.eager_ms, made.image = outputs.cpu_ms[EAGER], outputs.first
    made.thresholds = task.thresholds(outputs.outputs[EAGER], outputs.labels, classes)
    for name in runners:
        _judge(made, subject, folder / name, outputs, options)
    made.lines += [rung.line() for rung in made.rungs] + notes + failed
    made.lines += _left_out() if options.pick.measures else []
    made.defer = defer.choose(options.sure.rule, outputs.outputs, outputs.labels, made.thresholds, classes)
    made.lines += defer.lines_of(made.defer)
    return made


def _judge(made: Made, subject: Subject, path: Path, outputs: GraphOutputs, options: ExportOptions) -> None:
    """Require that an exact graph is exact, and record what a graph answered."""
    name, task = path.name, subject.recipe.student.task
    scores, difference, images = outputs.scores(name, task), outputs.difference(name), len(outputs.labels)
    if name in EXACT:
        parity.check_exact(name, scores, difference, options.check.tolerance, images)
    rounded = {"max_difference": float(f"{difference:.3g}"), "cpu_ms": round(outputs.cpu_ms[name], 3)}
    made.parity[name] = {"images": images, **scores.facts, **rounded}
    made.validation[name] = outputs.reference(name, task, subject.classes, bool(made.calibration)).record()
    megabytes = sum(file.stat().st_size for file in variants.files(path)) / 1e6
    line = f"max |d{'logit' if task.logits else 'value'}| {difference:.1e}, {scores.summary}, "
    line += f"{outputs.cpu_ms[name]:.2f} ms CPU an image (PyTorch {made.eager_ms:.2f})"
    made.lines.append(f"{name:16s} {megabytes:6.2f} MB  {line}")
    if options.pick.measures and name != PT2:
        made.qualities[name] = variants.quality(path, outputs, task)


def _write_float(folder: Path, student: Classifier, size: int, options: ExportOptions) -> dict[str, parity.Runner]:
    """Write the graphs in float32 and bf16, and return a function that runs each, by file name."""
    runners: dict[str, parity.Runner] = {}
    program = runtimes.export_program(runtimes.reparameterized(student), size)
    if options.graphs.pt2:
        torch.export.save(program, folder / PT2)
        runners[PT2] = runtimes.program_runner(folder / PT2)
    names = []
    if options.graphs.onnx:
        runtimes.write_onnx(program, folder / ONNX, runtimes.LOGITS if student.num_classes else runtimes.EMBEDDING)
        names.append(ONNX)
    if options.graphs.openvino or (options.pick.measures and runtimes.installed("openvino")):
        runtimes.write_openvino(folder / ONNX, folder / OPENVINO)
        names.append(OPENVINO)
    if options.pick.measures and runtimes.has_bf16():
        runtimes.write_openvino(folder / ONNX, folder / BF16, half=True)
        names.append(BF16)
    return {**runners, **{name: Variant.at(folder / name).runner() for name in names}}


def _write_int8(
    subject: Subject, folder: Path, images: ReadImages, options: ExportOptions
) -> tuple[list[int8.Rung], list[str]]:
    """Write the int8 graphs that are asked for, or measured; return what was tried, and a line for what failed.

    `--int8` must end in one that holds. Of `--compare` alone they are candidates: one that fails is left out, and the
    finished graphs in float32 stay.
    """
    nncf = all(runtimes.installed(name) for name in ("nncf", "openvino"))
    views = partial(images, training=True)
    if options.graphs.int8:
        exam = int8.Exam.of(subject.recipe.student.task, subject.student, partial(images, options.check.images))
        return int8.climb(folder, exam, views, options.check.max_drop, both=options.pick.measures and nncf), []
    if not options.pick.measures:
        return [], []
    candidates = {INT8: partial(runtimes.write_int8, folder / ONNX, folder / INT8)}
    if nncf:
        candidates[int8.STATIC] = partial(int8.post_training, folder / ONNX, folder / int8.STATIC, views)
    failed = []
    for name, make in candidates.items():
        try:
            make()
        except Exception as error:  # of any type: runtimes and NNCF have their own
            for path in variants.files(folder / name):
                path.unlink(missing_ok=True)
            reason = " ".join(str(error).split())[:200]
            failed.append(f"left out: {name}, because quantizing failed ({type(error).__name__}: {reason})")
    return [], failed


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
