"""Export the best student of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kd import config
from kd.artifacts.run_dir import RunDir
from kd.config.schema import DataSection, StudentSection
from kd.errors import RunError
from kd.export import graphs
from kd.export.card import Card, render
from kd.export.folder import complete, new_export, refuse_other
from kd.export.graphs import Made
from kd.host import environment, processor, versions
from kd.models import runtimes
from kd.models.classifier import Classifier, digest
from kd.models.teacher import count_parameters
from kd.models.timm_folder import export_files
from kd.references import written
from kd.setup.finished import Trust, best_student, opened_run
from kd.setup.recipe import BASELINE, Recipe, resolve


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
    path: Path,
    target: Path | None = None,
    options: Options | None = None,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> Exported:
    """Export the best student of a run folder.

    Args:
        path: the run folder.
        target: where; None: `export` in the run folder.
        options: what to write; None: the defaults.
        overrides: `key=value` over the run's configuration, such as where its data lies now.
        trust: import modules that the run names, and read images wherever it says.

    Raises:
        RunError: no run folder, no checkpoint, other data, what takes trust, or the disk is full.
        ModelError: a graph does not answer as PyTorch does.
        MissingExtra: a package that an option needs.
    """
    options = options or Options()
    folder, settings = opened_run(path, trust)
    recipe = resolve(config.load(config.to_dict(settings), overrides) if overrides else settings)
    classes = folder.manifest().get("classes")
    if not classes:
        raise RunError("run", f"'{path}' has no manifest.json", "", "Train it first: `kd-train CONFIG`")
    target, task, section = target or path / "export", recipe.student.task, recipe.data.section
    refuse_other(target)  # before minutes of work, not after
    vouched = Trust.of(trust, overrides, section)
    if options.onnx or options.pt2:  # they are compared on images
        vouched.check_folder(recipe.data)
    data_hash = folder.manifest().get("data") or ("" if vouched.images else "not recorded")
    student, provenance = best_student(folder, recipe.student, section, classes)
    with new_export(target) as draft:
        made = graphs.write(draft, student, recipe, classes, data_hash, options)
        if made.calibration:
            provenance |= {"digest": digest(student.network), "calibration": made.calibration}
        labels = classes if task.logits else ()
        content, weights = export_files(student.network, labels, section.eval_crop, task.problem_type)
        facts = {
            "format": 1,
            "name": recipe.record.name,
            "version": provenance["digest"][:12],
            "input": _input(student, section),
            "output": _output(student, made.thresholds),
            "parity": made.parity,
            "environment": _environment(),
        }
        card = described(folder, recipe, student, provenance, made)
        card = replace(card, license=options.license, commands=commands(target.name, options.onnx))
        (draft / "README.md").write_text(render(card), encoding="utf-8")
        complete(draft, content, weights, provenance, facts)
    return Exported(target, made.lines)


def described(folder: RunDir, recipe: Recipe, student: Classifier, provenance: Mapping[str, Any], made: Made) -> Card:
    """Return the contents of the model card."""
    manifest, section, task = folder.manifest(), recipe.data.section, recipe.student.task
    baseline = RunDir(folder.path / BASELINE).metrics("val")
    decides = task.scores.own[0].key if baseline else ""
    return Card(
        name=recipe.record.name,
        student=written(recipe.student.section.model),
        student_parameters=count_parameters(student),
        teacher=written(recipe.teacher.section.model),
        losses=[loss.kind for loss in recipe.student.losses],
        data=f"{section.kind}, content hash {manifest.get('data', 'not recorded')[:12]}",
        labels=manifest["classes"] if task.logits else (),
        thresholds=made.thresholds,
        calibration=made.calibration,
        width=0 if task.logits else student.num_features,
        metrics=provenance["metrics"],
        baseline=max(baseline, key=lambda row: row[decides]) if baseline else {},
        graphs=made.parity,
        eager_ms=made.eager_ms,
        processor=processor(),
        size=section.image_size,
        crop=section.eval_crop,
        license="",
        weights_from=_origin(recipe.student.section, student),
        version=provenance["digest"][:12],
        commands={},
        scores=task.scores,
    )


def commands(folder: str, onnx: bool) -> dict[str, str]:
    """Return how an export is used, by title."""
    found = {"With timm": f"timm.create_model('local-dir:{folder}', pretrained=True)"}
    if onnx:
        found["As an endpoint, without torch"] = (
            f"kd-serve {folder}\ncurl --data-binary @image.jpg -H 'content-type: image/jpeg' localhost:8080/invocations"
        )
    return found


def _origin(section: StudentSection, student: Classifier) -> str:
    if section.checkpoint:
        return f"started from the checkpoint '{Path(section.checkpoint).name}', whose licence kd does not know"
    if section.init == "pretrained":
        known = getattr(student.network, "pretrained_cfg", None) or {}
        licence = known.get("license", "not recorded")
        return f"started from timm's pretrained `{written(section.model)}`, licence: {licence}"
    return "trained from random initial weights"


def _input(student: Classifier, section: DataSection) -> dict[str, Any]:
    size = section.image_size
    return {
        "name": "image",
        "layout": f"uint8 [batch, 3, {size}, {size}], RGB",
        "size": size,
        "crop": section.eval_crop,
        "network_size": student.input_size or size,
    }


def _output(student: Classifier, thresholds: Mapping[str, Any]) -> dict[str, Any]:
    if student.num_classes:
        more = {"thresholds": thresholds} if thresholds else {}
        shape = f"float32 [batch, {student.num_classes}]"
        return {"name": runtimes.LOGITS, "layout": shape, "width": student.num_classes, **more}
    width = student.num_features
    return {"name": runtimes.EMBEDDING, "layout": f"float32 [batch, {width}], each of length 1", "width": width}


def _environment() -> dict[str, Any]:
    found = environment()
    found.pop("command")  # it holds paths of whoever exported, and this file is published
    found["packages"] |= versions("onnx", "onnxscript", "onnxruntime", "openvino")
    return found
