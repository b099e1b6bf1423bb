"""The graphs of an export, each compared with PyTorch before it is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kd.errors import ConfigError
from kd.export import parity
from kd.export.parity import EAGER
from kd.models import runtimes
from kd.models.classifier import Classifier

if TYPE_CHECKING:
    from kd.export.export import Options, Subject

CALIBRATION_IMAGES = 1000
ONNX, INT8, OPENVINO, PT2 = "model.onnx", "model.int8.onnx", "openvino.xml", "model.pt2"


@dataclass(slots=True)
class Made:
    """What was written and measured."""

    parity: dict[str, dict[str, Any]] = field(default_factory=dict)
    eager_ms: float = 0.0
    lines: list[str] = field(default_factory=list)
    thresholds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By class, where each is answered alone: see `kd.evaluation.Task.thresholds`."""
    calibration: dict[str, Any] = field(default_factory=dict)
    """What `parity.calibrate` found; empty: the logits are those of the run."""
    validation: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each graph answered on validation images: see `kd.shift.Reference`."""


def write(subject: Subject, folder: Path, options: Options) -> Made:
    """Write the graphs that the options name and compare each with PyTorch. Calibrating changes the last layer.

    Raises:
        RunError: the data is not that of the run.
        ModelError: a graph does not answer as PyTorch does.
        MissingExtra: a package that an option needs.
    """
    if not options.onnx and (options.int8 or options.openvino):
        raise ConfigError("--no-onnx", "--int8 and --openvino are made from model.onnx", "", "Leave out --no-onnx")
    task, student, classes = subject.recipe.student.task, subject.student, subject.classes
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
    made = Made(eager_ms=answers.cpu_ms[EAGER], calibration=calibration)
    made.thresholds = task.thresholds(answers.outputs[EAGER], answers.labels, classes)
    eager = answers.scores(EAGER, task)
    for name in runners:
        scores, difference, cpu_ms = answers.scores(name, task), answers.difference(name), answers.cpu_ms[name]
        what = f"max |d{'logit' if task.logits else 'value'}| {difference:.1e}"
        if name == INT8:
            what += parity.check_drop(name, scores, eager, options.max_drop, len(answers.labels))
        else:
            parity.check_exact(name, scores, difference, options.tolerance, len(answers.labels))
        files = [folder / name, folder / "openvino.bin"] if name == OPENVINO else [folder / name]
        size = sum(file.stat().st_size for file in files)
        made.lines.append(
            f"{name:16s} {size / 1e6:6.2f} MB  {what}, {scores.summary}, {cpu_ms:.2f} ms CPU an image "
            f"(PyTorch {made.eager_ms:.2f})"
        )
        rounded = {"max_difference": float(f"{difference:.3g}"), "cpu_ms": round(cpu_ms, 3)}
        made.validation[name] = answers.reference(name, task, classes, bool(calibration)).record()
        made.parity[name] = {"images": len(answers.labels), **scores.facts, **rounded}
    made.lines += [calibrated] if calibrated else []
    return made


def _write(folder: Path, student: Classifier, size: int, options: Options) -> dict[str, parity.Runner]:
    runners: dict[str, parity.Runner] = {}
    program = runtimes.export_program(student, size)
    if options.pt2:
        runtimes.write_program(program, folder / PT2)
        runners[PT2] = runtimes.program_runner(folder / PT2)
    if options.onnx:
        runtimes.write_onnx(program, folder / ONNX, runtimes.LOGITS if student.num_classes else runtimes.EMBEDDING)
        runners[ONNX] = runtimes.onnx_runner(folder / ONNX)
    if options.int8:
        runtimes.write_int8(folder / ONNX, folder / INT8)
        runners[INT8] = runtimes.onnx_runner(folder / INT8)
    if options.openvino:
        runtimes.write_openvino(folder / ONNX, folder / OPENVINO)
        runners[OPENVINO] = runtimes.openvino_runner(folder / OPENVINO)
    return runners
