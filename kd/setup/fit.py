"""Where a fitted teacher lies: a folder named by a hash of everything that its weights depend on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from kd.contracts import TeacherModel
from kd.errors import RunError
from kd.setup.data import Data
from kd.setup.recipe import Recipe, TeacherPlan, resolve
from kd.setup.teacher import load_teachers

# Keys that may differ when a run is entered again: they change what is shown and how fast, not what is computed.
# Where the data lies is one of them: its content is compared by its fingerprint.
FREE = (
    "run.name",
    "run.folder",
    "run.keep",
    "run.mirror",
    "run.trackers",
    "run.every.",
    "data.root",
    "data.copies",
    "data.workers",
    "data.loader",
    "data.deadline",
    "data.eval_batch",
    "data.max_skipped",  # it can only end a run
    "teacher.shard",
    "teacher.pipeline",
    "optimizer.on_nonfinite",  # no bit of a run depends on it before the first such step
    "backend.timeout_seconds",
    "profile.",
    "teacher.cache.path",
    "price.",
    "teacher.cache.max_gb",  # it can only refuse
)


def fit_folders(plan: TeacherPlan, fingerprint: str) -> dict[str, tuple[Recipe, Path]]:
    """Return for each teacher to be fitted the recipe, with its run folder, and the export folder that it leaves."""
    found = {}
    for where, fit in plan.fits.items():
        # How often it is evaluated decides which weights are the best ones, and those are kept.
        free, keys = (*FREE, "student.kind"), resolve(fit).record.keys  # the kind is always timm
        counts = {key: value for key, value in keys.items() if not key.startswith(free) or key == "run.every.evaluate"}
        content = json.dumps({"keys": counts, "data": fingerprint}, sort_keys=True, default=str)
        key = hashlib.sha256(content.encode()).hexdigest()[:12]
        name = f"{Path(fit.student.model).name.replace(':', '_')}-{key}"
        recipe = resolve(replace(fit, run=replace(fit.run, name=name)))
        recipe = replace(recipe, student=replace(recipe.student, where=where))
        found[where] = recipe, recipe.record.path / "export"
    return found


def load_fitted(plan: TeacherPlan, data: Data) -> TeacherModel | None:
    """Load the teacher of a finished run, several as one; None without any."""
    weights: dict[str, str | Path] = {}
    for where, (_, target) in fit_folders(plan, data.fingerprint).items():
        weights[where] = target
        if not is_fitted(target):
            raise RunError(where, f"the fitted teacher is not at '{target}'", "", "Run in the folder of kd-train")
    return load_teachers(plan, data, weights).model


def is_fitted(target: Path) -> bool:
    """Return whether a teacher was exported there."""
    return (target / "model.safetensors").is_file()
