"""Fit the teacher, or find it fitted."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from kd.artifacts.run_dir import RunDir
from kd.config import Config
from kd.config.schema import TeacherSection
from kd.contracts import Backend, TeacherModel
from kd.errors import ConfigError, FolderInUse, RunError
from kd.jobs.distill import distill
from kd.jobs.folder import FREE, export_run, open_run
from kd.models.classifier import Ensemble
from kd.setup.build import distributed
from kd.setup.data import Data, open_data
from kd.setup.recipe import Recipe
from kd.setup.teacher import load_teacher

POLL = 0.5
"""Seconds between two looks at the folder."""
MINE, FITTED, IN_USE = 0, 1, 2
log = logging.getLogger("kd")


def teach(settings: Config) -> list[Path]:
    """Fit the teachers of a configuration that have no checkpoint, or find them fitted; return their folders.

    Raises:
        ConfigError: the config does not say how to fit one.
    """
    if not settings.teacher.fit.epochs:
        raise ConfigError("teacher.fit.epochs", "is 0", "At least 1", "Say for how long to fit the teacher")
    recipe = Recipe(settings)
    with distributed(recipe.backend) as backend:
        data = open_data(recipe.data, recipe.run.folder, backend)
        return [fit_teacher(fit, data, backend) for fit in recipe.fits.values()]


def obtain_teacher(recipe: Recipe, data: Data, backend: Backend) -> tuple[TeacherModel | None, Data]:
    """Load the teacher, or all of several; fit first where there is no checkpoint.

    Returns:
        The teacher, and the data with its classes, where the images have no labels.
    """
    section = recipe.teacher
    if not section.model:
        return None, data
    if section.shard or section.pipeline:
        backend.check_divided(section.pipeline)  # before minutes are spent on fitting one
    on_meta = section.shard and backend.rank != 0
    models, reads, size = [], recipe.reads, recipe.data.image_size
    images = data.images(recipe.seed, recipe.views)
    for where, alone in recipe.teachers.items():
        folder = str(fit_teacher(recipe.fits[where], data, backend)) if where in recipe.fits else ""
        place = (folder, on_meta, where, images, reads.teacher_logits, reads.sigmoid)
        models.append(load_teacher(alone, data.asked, size, reads.features, *place))
        data = data.with_classes(models[0].classes)  # those of the others must be the same
    return merge_teachers(section, models, reads.sigmoid), data


def merge_teachers(section: TeacherSection, models: Sequence[TeacherModel], sigmoid: bool) -> TeacherModel:
    """Return the one teacher, or several as one."""
    weights = [1.0, *(member.weight for member in section.also)]
    return models[0] if len(models) == 1 else Ensemble(models, weights, sigmoid)


def fit_key(fit: Recipe, fingerprint: str) -> str:
    """Return a hash of everything that the weights of a fitted teacher depend on.

    Args:
        fit: the teacher as a student of the labels.
        fingerprint: of the data.
    """
    # How often it is evaluated decides which weights are the best ones, and those are kept.
    counts = {key: value for key, value in fit.keys.items() if not key.startswith(FREE) or key == "run.every.evaluate"}
    content = json.dumps({"keys": counts, "data": fingerprint}, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def fit_teacher(plan: Config, data: Data, backend: Backend) -> Path:
    """Fit a teacher on the labels and keep its best epoch; one fitted before from the same content is reused.

    While another process fits it, wait for it.

    Args:
        plan: the teacher as a student of the labels.
        data: both splits.
        backend: set up.

    Returns:
        An export folder, named by a hash of everything that the weights depend on.
    """
    recipe, target = fit_place(plan, data.fingerprint)
    with ExitStack() as stack:
        folder = open_fit(stack, recipe, target, backend)
        if folder is None:
            if backend.rank == 0:
                log.info("teacher: reusing '%s'", target)
            return target
        distill(recipe, data, backend, None, folder, "teacher")
        if backend.rank == 0:
            export_run(folder, recipe, target, data.classes)
        backend.barrier()
    return target


def fit_place(plan: Config, fingerprint: str) -> tuple[Recipe, Path]:
    """Return the recipe of a fit with its run folder, and the export folder that it leaves."""
    key = fit_key(Recipe(plan), fingerprint)
    name = f"{Path(plan.student.model).name.replace(':', '_')}-{key}"
    recipe = Recipe(replace(plan, run=replace(plan.run, name=name)))
    return recipe, recipe.path / "export"


def is_fitted(target: Path) -> bool:
    """Return whether a teacher was exported there."""
    return (target / "model.safetensors").is_file()


def open_fit(stack: ExitStack, recipe: Recipe, target: Path, backend: Backend) -> RunDir | None:
    """Open the run folder of a fit until `stack` ends; None if the teacher is fitted. All ranks must call it.

    While another process holds the folder, wait for it. Ranks look together, so that no collective runs into its
    deadline meanwhile.

    Raises:
        RunError: the other process has written nothing for `backend.timeout_seconds`.
    """
    seen, since, told = "", time.monotonic(), False
    while True:
        outcome, folder, holder = FITTED, None, ""
        if backend.rank == 0 and not is_fitted(target):
            try:
                folder = stack.enter_context(open_run(recipe, 0))
                outcome = FITTED if is_fitted(target) else MINE  # it may have been fitted since the first look
            except FolderInUse as error:
                outcome, holder = IN_USE, str(error.wrong)
        mine = float(outcome if backend.rank == 0 else 0)
        outcome = int(backend.reduce_sum(torch.tensor([mine], device=backend.device)).item())
        if outcome == FITTED:
            return None
        if outcome == MINE:
            return folder or stack.enter_context(open_run(recipe, backend.rank))
        if backend.rank == 0:
            now = holder + _content(recipe.path)
            if now != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > recipe.backend.timeout_seconds:
                wrong = f"{holder}, and has written nothing for {recipe.backend.timeout_seconds:g} s"
                raise RunError("teacher.fit", wrong, "", "End that process, or raise backend.timeout_seconds")
            if not told:
                log.info("teacher: %s; waiting for the teacher that it fits", holder)
                told = True
        time.sleep(POLL)


def _content(path: Path) -> str:
    """Return sizes and times of what lies in a run folder: it changes while the run makes progress."""
    found = []
    for file in sorted([*path.glob("*"), *path.glob("checkpoints/*")]):
        try:
            state = file.stat()
        except OSError:  # removed since it was listed
            continue
        # a look at the lock changes its time, and the monitor goes on where the run is stuck
        if file.name != ".lock" and not file.name.startswith("monitor_"):
            found.append(f"{file.name} {state.st_size} {state.st_mtime_ns}")
    return "\n".join(found)
