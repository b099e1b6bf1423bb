"""A run folder: the configuration it was started with, its best student."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from kd import config
from kd.artifacts import export as artifact
from kd.artifacts.run_dir import RunDir
from kd.config import Config
from kd.engine.criterion import Distillation
from kd.errors import KdError, RunError
from kd.host import environment
from kd.models.classifier import Classifier, digest
from kd.models.folder import export_files
from kd.object_store import join
from kd.references import written
from kd.setup.recipe import Recipe, hashes
from kd.setup.student import build_student

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


@contextmanager
def open_run(recipe: Recipe, rank: int) -> Iterator[RunDir]:
    """Open the folder of a run and close it again; refuse one that holds another run, naming the keys that differ."""
    mirror = recipe.run.mirror and join(recipe.run.mirror, recipe.path.relative_to(recipe.run.folder).as_posix())
    folder = RunDir(recipe.path, rank, recipe.run.keep, mirror)
    folder.restore_copy()
    stored = folder.stored_config()
    differences = different_keys(Recipe(_parse(folder, stored)).keys, recipe.keys) if stored is not None else []
    folder.open(recipe.yaml, [*differences, *changed_values(stored or "", recipe)])
    try:
        yield folder
        folder.complete_copy()
    finally:
        folder.close()


def opened_run(path: Path) -> tuple[RunDir, Config]:
    """Open a finished or interrupted run folder for reading.

    Raises:
        RunError: it is not a run folder.
    """
    folder = RunDir(path)
    stored = folder.stored_config()
    if stored is None:
        remedy = "Point at runs/NAME, the folder that `kd-train` wrote"
        raise RunError("run", f"'{path}' is not a run folder: it has no config.yaml", "", remedy)
    return folder, _parse(folder, stored)


def _parse(folder: RunDir, text: str) -> Config:
    """Load a stored configuration.

    Raises:
        RunError: it was changed by hand, or by another version of kd.
    """
    try:
        content: Any = OmegaConf.to_container(OmegaConf.create(text))
        return config.load(content if isinstance(content, dict) else {}, here=False)
    except (YAMLError, OmegaConfBaseException, KdError) as error:
        reason = "; ".join(" ".join(line.split()) for line in str(error).splitlines())
        remedy = "Restore it, or choose another run.name"
        raise RunError(
            "run.name", f"'{folder.config_file}' is not the config of a run: {reason}", "", remedy
        ) from error


def different_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List `key (stored -> now)` wherever two configurations compute different things."""
    keys = [k for k in sorted(old.keys() | new.keys()) if not k.startswith(FREE)]
    return [f"{k} ({written(old.get(k))} -> {written(new.get(k))})" for k in keys if old.get(k) != new.get(k)]


def changed_values(stored: str, recipe: Recipe) -> list[str]:
    """List the keys whose value from the environment is not the one that the run began with."""
    lines = [line.split() for line in stored.splitlines() if line.startswith("# sha256 ")]
    old, new = {key: text for _, _, key, text in lines}, hashes(recipe.keys)
    changed = [key for key in sorted(old.keys() & new.keys()) if old[key] != new[key] and not key.startswith(FREE)]
    return [f"{key} (another value of {recipe.shown[key]})" for key in changed]


def require_same(key: str, known: dict[str, Any], facts: dict[str, Any]) -> None:
    """Refuse to go on with a run on other data or with another teacher."""
    if key in known and key in facts and known[key] != facts[key]:
        raise RunError(
            "run.name",
            f"this run was started with another {key} (its content hash differs)",
            "A run goes on with what it began with",
            "Choose another run.name, or restore what was there",
        )


def export_run(folder: RunDir, recipe: Recipe, target: Path, classes: Sequence[str]) -> None:
    """Write the best checkpoint's student (its averaged weights where there are any) as a timm folder."""
    student, provenance = best_student(folder, recipe, classes)
    content, weights = export_files(student.network, classes, recipe.data.eval_crop, recipe.reads.sigmoid)
    artifact.export(target, content, weights, provenance)


def best_student(folder: RunDir, recipe: Recipe, classes: Sequence[str]) -> tuple[Classifier, dict[str, Any]]:
    """Return the best checkpoint's student and where it came from; what its losses learned beside it is left out."""
    state, tensors, _ = folder.best()
    section = replace(recipe.student, init="scratch", checkpoint="")  # the weights are loaded right afterwards
    answers = classes if recipe.reads.student_logits else ()
    student = build_student(section, recipe.seed, answers, recipe.data.image_size)
    load_student(student, tensors)
    rows = [row for row in folder.metrics("val") if row["step"] == state.step]
    provenance = {
        "kd": environment()["packages"]["kd"],
        "step": state.step,
        "metrics": rows[-1] if rows else {},
        "run": recipe.name,
        "digest": digest(student.network),
        "eval_crop": recipe.data.eval_crop,
    }
    return student, provenance


def load_distillation(distillation: Distillation, tensors: dict[str, torch.Tensor]) -> None:
    """Load the weights of a checkpoint: those of the losses' projectors, and the student's, averaged ones first."""
    prefix = "model."
    distillation.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    load_student(distillation.student, tensors)


def load_student(student: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Load the student's weights of a checkpoint, averaged ones first."""
    prefix = "average." if any(name.startswith("average.") for name in tensors) else "model.student."
    student.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
