"""Export the best student of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd import config
from kd.errors import RunError
from kd.export import folder as artifact
from kd.export import graphs as _graphs
from kd.host import environment, versions
from kd.models import runtimes as onnx
from kd.models.classifier import Classifier, digest
from kd.models.timm_folder import export_files
from kd.setup.finished import best_student, opened_run
from kd.setup.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What `kd-export` writes beside the folder that timm loads."""

    onnx: bool = True
    """model.onnx, compared with PyTorch on validation images; without it the data is not needed."""
    int8: bool = False
    """model.int8.onnx, refused if it loses more than `max_drop` of the accuracy, or of the cosine with PyTorch's."""
    openvino: bool = False
    pt2: bool = False
    calibrate: bool = True
    """Divide the logits by one temperature, fitted on validation images, so that confidences are right on average.
    Where these are not read (no graph is written), nothing is divided."""
    max_drop: float = 0.01
    tolerance: float = 1e-3
    images: int = 2000
    """How many validation images are compared, evenly spaced; 0: all."""
    license: str = ""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    folder: Path
    lines: Sequence[str]
    """One for each graph, for a person."""


def export(
    path: Path, target: Path | None = None, options: Options | None = None, overrides: Sequence[str] = ()
) -> Exported:
    """Export the best student of a run folder.

    Args:
        path: the run folder.
        target: where; None: `export` in the run folder.
        options: what to write; None: the defaults.
        overrides: `key=value` over the run's configuration, such as where its data lies now.

    Raises:
        RunError: no run folder, no checkpoint, other data, or the disk is full.
        ModelError: a graph does not answer as PyTorch does.
        MissingExtra: a package that an option needs.
    """
    options = options or Options()
    folder, settings = opened_run(path)
    recipe = Recipe(config.load(config.to_dict(settings), overrides) if overrides else settings)
    classes = folder.manifest().get("classes")
    if not classes:
        raise RunError("run", f"'{path}' has no manifest.json", "", "Train it first: `kd-train CONFIG`")
    target = target or path / "export"
    artifact.refuse_other(target)  # before minutes of work, not after
    student, provenance = best_student(folder, recipe, classes)
    labels = classes if student.num_classes else ()
    with tempfile.TemporaryDirectory(prefix="kd-export-") as temporary:
        extras = Path(temporary)
        made = _graphs.write(extras, student, recipe, classes, folder.manifest().get("data", ""), options)
        if made.calibration:
            provenance |= {"digest": digest(student.network), "calibration": made.calibration}
        content, weights = export_files(student.network, labels, recipe.data.eval_crop, recipe.reads.sigmoid)
        facts = _facts(recipe, student, provenance, made)
        version, metrics = facts["version"], provenance["metrics"]
        card = _graphs.card(folder, recipe, student, version, metrics, made, options, target)
        (extras / "README.md").write_text(card, encoding="utf-8")
        artifact.export(target, content, weights, provenance, extras, facts)
    return Exported(target, made.lines)


def _facts(recipe: Recipe, student: Classifier, provenance: dict[str, Any], made: _graphs.Made) -> dict[str, Any]:
    size = recipe.data.image_size
    return {
        "format": 1,
        "name": recipe.name,
        "version": provenance["digest"][:12],
        "input": {
            "name": "image",
            "layout": f"uint8 [batch, 3, {size}, {size}], RGB",
            "size": size,
            "crop": recipe.data.eval_crop,
            "network_size": student.input_size or size,
        },
        "output": _output(student, made),
        "parity": made.parity,
        "environment": _environment(),
    }


def _output(student: Classifier, made: _graphs.Made) -> dict[str, Any]:
    if student.num_classes:
        more = {"thresholds": made.thresholds} if made.thresholds else {}
        shape = f"float32 [batch, {student.num_classes}]"
        return {"name": onnx.LOGITS, "layout": shape, "width": student.num_classes, **more}
    width = student.num_features
    return {"name": onnx.EMBEDDING, "layout": f"float32 [batch, {width}], each of length 1", "width": width}


def _environment() -> dict[str, Any]:
    found = environment()
    found.pop("command")  # it holds paths of whoever exported, and this file is published
    found["packages"] |= versions("onnx", "onnxscript", "onnxruntime", "openvino")
    return found
