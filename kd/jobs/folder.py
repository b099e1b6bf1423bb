"""A run folder: the configuration it was started with, its best student."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kd.artifacts.run_dir import RunDir
from kd.errors import RunError
from kd.export import folder as artifact
from kd.files.object_store import join
from kd.models.timm_folder import export_files
from kd.references import written
from kd.setup.finished import best_student, parse
from kd.setup.recipe import Recipe, hashes

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
    differences = different_keys(Recipe(parse(folder, stored)).keys, recipe.keys) if stored is not None else []
    folder.open(recipe.yaml, [*differences, *changed_values(stored or "", recipe)])
    try:
        yield folder
        folder.complete_copy()
    finally:
        folder.close()


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
