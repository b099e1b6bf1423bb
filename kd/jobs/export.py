"""Export the best student of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kd import build
from kd.artifacts import manifest
from kd.artifacts.export import export as write_export
from kd.artifacts.run_dir import RunDir
from kd.config import Config
from kd.errors import RunError
from kd.jobs._folder import opened_run
from kd.models.classifier import Classifier
from kd.models.load import digest, export_files


def export(path: Path, target: Path | None = None) -> Path:
    """Export the best student of a run folder; return the folder written.

    Raises:
        RunError: no run folder, no checkpoint, or the disk is full.
    """
    folder, settings = opened_run(path)
    classes = folder.manifest().get("classes")
    if not classes:
        raise RunError("run", f"'{path}' has no manifest.json", "", "Train it first: `kd-train CONFIG`")
    target = target or path / "export"
    export_run(folder, settings, target, classes)
    return target


def export_run(folder: RunDir, settings: Config, target: Path, classes: Sequence[str]) -> None:
    """Write the best checkpoint's student (its averaged weights where there are any) as a timm folder."""
    state, tensors, _ = folder.best()
    student = build.student_model(replace_init(settings), classes, False)
    load_student(student, tensors)
    rows = [row for row in folder.metrics("val") if row["step"] == state.step]
    provenance = {
        "kd": manifest.surroundings()["packages"]["kd"],
        "step": state.step,
        "metrics": rows[-1] if rows else {},
        "run": settings.run.name,
        "digest": digest(student.network),
        "eval_crop": settings.data.eval_crop,
    }
    content, weights = export_files(student.network, classes, settings.data.eval_crop)
    write_export(target, content, weights, provenance)


def replace_init(settings: Config) -> Config:
    """Return the config with a student built from nothing, for weights that are loaded right afterwards."""
    return replace(settings, student=replace(settings.student, init="scratch", checkpoint=""))


def load_student(student: Classifier, tensors: dict[str, torch.Tensor]) -> None:
    """Load the student's weights of a checkpoint, averaged ones first."""
    prefix = "average." if any(name.startswith("average.") for name in tensors) else "model.student."
    student.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
