"""Write the graphs of an export, with everything that is measured on images."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kd.core.errors import MissingExtra
from kd.deploy.export import defer, parity
from kd.deploy.export.accept import AcceptSearch
from kd.deploy.export.calibrate import calibrate
from kd.deploy.export.flags import ExportOptions
from kd.deploy.export.graphs import ExportArtifacts, GraphExporter, Subject
from kd.deploy.export.parity import EAGER
from kd.deploy.export.passing_on import describe_second
from kd.deploy.serve import self_check
from kd.deploy.serve.engines import open_graph
from kd.models.examination import examine
from kd.models.examined import IMAGES, noise_images
from kd.parts import registry

# most images for calibration: more do not improve one number, and PyTorch predicts each
CALIBRATION_IMAGES = 1000


def write_graphs(
    subject: Subject,
    folder: Path,
    options: ExportOptions,
    seal: Callable[[ExportArtifacts], object],
) -> ExportArtifacts:
    """Write the requested graphs and compare each with PyTorch.

    `seal` completes a folder so that `kd-serve` can serve it.
    """
    if not options.any_graph:
        return _without_graphs(subject)
    task = subject.recipe.task
    student = subject.student
    classes = subject.classes
    _require_packages(options)  # before the images are read
    second = describe_second(options, task, classes, subject.recipe.data)
    student.eval()
    artifacts = ExportArtifacts(rule=options.rule)
    calibration_lines: list[str] = []
    with subject.images() as images:
        pixels = next(iter(images(IMAGES)))[0]
        examine(student, "student", torch.from_numpy(pixels), bool(task.logits))
        if options.calibrate and task.logits == "softmax":
            limit = min(options.images or CALIBRATION_IMAGES, CALIBRATION_IMAGES)
            artifacts.calibration, line = calibrate(student, images(limit))
            calibration_lines.append(line)
        exporter = GraphExporter(subject, folder, options, images, artifacts)
        exporter.add_first()
        artifacts.thresholds = task.thresholds(
            exporter.outputs.outputs[EAGER], exporter.outputs.labels, classes
        )
        artifacts.lines += calibration_lines
        if options.accept is not None:
            AcceptSearch(exporter, options.accept, seal, second).pick_graph()
        if options.compare:
            seal(artifacts)
            exporter.measure_all()
    outputs = exporter.outputs
    if any(encoded for encoded, _ in outputs.images):
        outputs.write_images(folder / parity.IMAGES, classes if task.logits else ())
    compared = {
        name: logits
        for name, logits in outputs.outputs.items()
        if name == EAGER or name in artifacts.parity
    }
    artifacts.defer = defer.choose(
        artifacts.rule, compared, outputs.labels, artifacts.thresholds, classes
    )
    artifacts.lines += defer.defer_lines(artifacts.defer)
    graphs = registry.graphs()
    served = [name for name in graphs if name in compared and not graphs[name].code]
    artifacts.self_check = _self_check(subject, folder, served)
    return artifacts


def _without_graphs(subject: Subject) -> ExportArtifacts:
    task = subject.recipe.task
    classes = subject.classes
    pixels = noise_images(subject.recipe.data.image_size)
    examine(subject.student, "student", pixels, bool(task.logits))
    logits = torch.zeros(0, len(classes))
    labels = task.no_labels(0, len(classes))
    return ExportArtifacts(thresholds=task.thresholds(logits, labels, classes))


def _require_packages(options: ExportOptions) -> None:
    for name, graph in registry.graphs().items():
        if not options.wants(name):
            continue
        if reason := registry.exporter(name).missing(name, True):
            wrong, _, remedy = reason.partition(": ")
            raise MissingExtra(graph.option or "--onnx", wrong, "", remedy)


def _self_check(
    subject: Subject, folder: Path, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Write the self-check of the graphs; return its entry in manifest.json.

    The first graph is model.onnx.
    """
    if not names:
        return {}
    data = subject.recipe.data
    engines = {name: open_graph(folder / name) for name in names}
    labels = subject.classes if subject.recipe.task.logits else ()
    entries = self_check.write(
        folder, engines, labels, data.image_size, data.crop_pct, data.bits
    )
    return {
        name: entry | registry.exporter(name).least(folder / name)
        for name, entry in entries.items()
    }
