"""The graphs of an export, each compared with PyTorch before it is kept, and the model card that tells the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.artifacts.run_dir import RunDir
from kd.errors import ConfigError, RunError
from kd.export import parity as _parity
from kd.export.card import Card, render
from kd.host import processor
from kd.models import runtimes as onnx
from kd.models.classifier import Classifier
from kd.models.teacher import count_parameters
from kd.references import written
from kd.setup.build import distributed
from kd.setup.data import open_data
from kd.setup.recipe import Recipe
from kd.tasks_scores_tmp import stand_in

if TYPE_CHECKING:
    from kd.export.export import Options

CALIBRATION_IMAGES = 1000
ONNX, INT8, OPENVINO, PT2 = "model.onnx", "model.int8.onnx", "openvino.xml", "model.pt2"


@dataclass(slots=True)
class Made:
    """What was written and measured."""

    parity: dict[str, dict[str, Any]] = field(default_factory=dict)
    eager_ms: float = 0.0
    lines: list[str] = field(default_factory=list)
    thresholds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By class, where each is answered alone: see `_parity.chosen_thresholds`."""
    calibration: dict[str, Any] = field(default_factory=dict)
    """What `_parity.calibrate` found; empty: the logits are those of the run."""


def write(
    folder: Path, student: Classifier, recipe: Recipe, classes: Sequence[str], data_hash: str, options: Options
) -> Made:
    """Write the graphs that the options name and compare each with PyTorch.

    Args:
        folder: where.
        student: on the CPU; calibrating changes its last layer.
        recipe: of the run.
        classes: in the order of the logits.
        data_hash: the content hash of the run's data.
        options: what to write.

    Raises:
        RunError: the data is not that of the run.
        ModelError: a graph does not answer as PyTorch does.
        MissingExtra: a package that an option needs.
    """
    if not options.onnx and (options.int8 or options.openvino):
        raise ConfigError("--no-onnx", "--int8 and --openvino are made from model.onnx", "", "Leave out --no-onnx")
    unchosen = _parity.chosen_thresholds(_parity.Row(), classes) if recipe.reads.sigmoid else {}
    if not options.onnx and not options.pt2:
        return Made(thresholds=unchosen)
    if options.onnx:  # before the images are read
        for name in ("onnx", "onnxscript", "onnxruntime"):
            onnx.require(name, "--onnx")
    student.eval()
    calibration, calibrated = {}, ""
    with distributed(recipe.backend) as backend:
        data = open_data(recipe.data, recipe.run.folder, backend, fill=False)
        if (data.classes and list(data.classes) != list(classes)) or (data_hash and data.fingerprint != data_hash):
            wrong = "the data is not what the run was trained on (its content hash differs)"
            remedy = "Restore it, or name where it lies: kd-export RUN data.root=FOLDER"
            raise RunError("data", wrong, "Graphs are compared on the run's own validation split", remedy)
        if options.calibrate and student.num_classes and not recipe.reads.sigmoid:
            shown = _parity.validation_images(data, min(options.images or CALIBRATION_IMAGES, CALIBRATION_IMAGES))
            calibration, calibrated = _parity.calibrate(student, shown)
        runners = _write(folder, student, recipe.data.image_size, options)
        eager, rows = _parity.compare(student, runners, _parity.validation_images(data, options.images))
    made = Made(eager_ms=eager.cpu_ms, calibration=calibration)
    made.thresholds = _parity.chosen_thresholds(eager, classes) if recipe.reads.sigmoid else {}
    for name, row in rows.items():
        if name == INT8:
            note = _parity.check_drop(name, row, eager, options.max_drop)
        else:
            note = _parity.check_exact(name, row, options.tolerance)
        files = [folder / name, folder / "openvino.bin"] if name == OPENVINO else [folder / name]
        size = sum(file.stat().st_size for file in files)
        made.lines.append(
            f"{name:16s} {size / 1e6:6.2f} MB  {note}, {row.summary}, {row.cpu_ms:.2f} ms CPU an image "
            f"(PyTorch {eager.cpu_ms:.2f})"
        )
        made.parity[name] = row.facts()
    made.lines += [calibrated] if calibrated else []
    return made


def _write(folder: Path, student: Classifier, size: int, options: Options) -> dict[str, _parity.Runner]:
    runners: dict[str, _parity.Runner] = {}
    program = onnx.export_program(student, size)
    if options.pt2:
        onnx.write_program(program, folder / PT2)
        runners[PT2] = onnx.program_runner(folder / PT2)
    if options.onnx:
        onnx.write_onnx(program, folder / ONNX, onnx.LOGITS if student.num_classes else onnx.EMBEDDING)
        runners[ONNX] = onnx.onnx_runner(folder / ONNX)
    if options.int8:
        onnx.write_int8(folder / ONNX, folder / INT8)
        runners[INT8] = onnx.onnx_runner(folder / INT8)
    if options.openvino:
        onnx.write_openvino(folder / ONNX, folder / OPENVINO)
        runners[OPENVINO] = onnx.openvino_runner(folder / OPENVINO)
    return runners


def card(
    folder: RunDir,
    recipe: Recipe,
    student: Classifier,
    version: str,
    metrics: dict[str, Any],
    made: Made,
    options: Options,
    target: Path,
) -> str:
    """Return the model card."""
    scores = stand_in(recipe.reads.student_logits, recipe.reads.sigmoid)  # the task's
    baseline = RunDir(folder.path / "labels_only").metrics("val")
    commands = {"With timm": f"timm.create_model('local-dir:{target.name}', pretrained=True)"}
    if options.onnx:
        commands["As an endpoint, without torch"] = (
            f"kd-serve {target.name}\n"
            "curl --data-binary @image.jpg -H 'content-type: image/jpeg' localhost:8080/invocations"
        )
    return render(
        Card(
            name=recipe.name,
            student=written(recipe.student.model),
            student_parameters=count_parameters(student),
            teacher=written(recipe.teacher.model),
            losses=[section.kind for section in recipe.losses],
            data=f"{recipe.data.kind}, content hash {folder.manifest().get('data', 'not recorded')[:12]}",
            labels=folder.manifest()["classes"] if student.num_classes else (),
            thresholds=made.thresholds,
            calibration=made.calibration,
            width=0 if student.num_classes else student.num_features,
            metrics=metrics,
            scores=scores,
            baseline=max(baseline, key=lambda row: row[scores.deciding(row).key], default={}),
            graphs=made.parity,
            eager_ms=made.eager_ms,
            processor=processor(),
            size=recipe.data.image_size,
            crop=recipe.data.eval_crop,
            license=options.license,
            weights_from=_origin(recipe, student),
            version=version,
            commands=commands,
        )
    )


def _origin(recipe: Recipe, student: Classifier) -> str:
    section = recipe.student
    if section.checkpoint:
        return f"started from the checkpoint '{Path(section.checkpoint).name}', whose licence kd does not know"
    if section.init == "pretrained":
        known = getattr(student.network, "pretrained_cfg", None) or {}
        licence = known.get("license", "not recorded")
        return f"started from timm's pretrained `{written(section.model)}`, licence: {licence}"
    return "trained from random initial weights"
