"""Fit the teacher, or find it fitted."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from kd.config import Config
from kd.core.contracts import Backend
from kd.core.errors import ConfigError, FolderInUse, RunError
from kd.files.run_dir import RunDir
from kd.jobs.distill import distill
from kd.jobs.observe import accounted
from kd.jobs.opened import no_teachers, open_run, opened
from kd.models.timm_folder import export_files
from kd.setup.build import Setting
from kd.setup.data import Data
from kd.setup.recipe import Recipe, Record, TeacherPlan, fit_folders, is_fitted, resolve
from kd.setup.teacher import META, Teachers, load_teachers

POLL = 0.5  # seconds between two looks at the folder
MINE, FITTED, IN_USE = 0, 1, 2  # what rank 0 found; a number, because it is summed over the ranks
log = logging.getLogger("kd")


def teach(settings: Config, before: float = 0.0) -> list[Path]:
    """Fit the teachers of a configuration that have no checkpoint, or find them fitted; return their folders.

    The time of the first fit begins `before` seconds ago.
    """
    if not settings.teacher.fit.length:
        remedy = "Say for how long to fit the teacher, here or by teacher.fit.steps"
        raise ConfigError("teacher.fit.epochs", "is 0", "At least 1", remedy)
    started = time.perf_counter() - before
    recipe = resolve(settings)
    with accounted(started), opened(recipe, no_teachers) as run:
        data = run.setting.teachers.data
        fits = fit_folders(recipe.teacher, data.fingerprint).values()
        return [fit_teacher(*fit, data, run.setting.backend) for fit in fits]


def obtain_teachers(plan: TeacherPlan, data: Data, backend: Backend) -> Teachers:
    """Load the teacher, or all of several; fit first where there is no checkpoint. All ranks must call it."""
    if plan.shard or plan.pipeline:
        backend.check_divided(plan.pipeline)  # before minutes are spent on fitting one
    weights: dict[str, str | Path] = {}
    for where, (fit, target) in fit_folders(plan, data.fingerprint).items():
        weights[where] = fit_teacher(fit, target, data, backend)
    if plan.shard and backend.rank != 0:
        weights = dict.fromkeys(plan.members, META)
    return load_teachers(plan, data, weights)


def fit_teacher(recipe: Recipe, target: Path, data: Data, backend: Backend) -> Path:
    """Fit a teacher on the labels and keep its best epoch; one fitted before from the same content is reused.

    While another process fits it, wait for it.
    """
    with ExitStack() as stack:
        folder = open_fit(stack, recipe.record, target, backend, recipe.backend.timeout_seconds)
        if folder is None:
            if backend.rank == 0:
                log.info("teacher: reusing '%s'", target)
            return target
        if backend.rank == 0:
            weights = {"scratch": "random", "pretrained": "pretrained"}[recipe.student.init]
            log.info("teacher: learning rate %g, from %s weights", recipe.loop.optimizer.lr, weights)
        data = replace(data, plan=recipe.data).with_labels()  # its own seed, batch size and views
        distill(recipe, Setting(Teachers(None, data), backend, recipe.backend), folder, "teacher", final="")
        if backend.rank == 0:
            from kd.deploy.export.package import write_folder  # these two only where a teacher was fitted
            from kd.study.finished import best_student

            student, provenance = best_student(folder, recipe.student, data.plan, data.classes)
            problem_type = recipe.student.task.problem_type
            content, weights = export_files(student, data.classes, data.plan.eval_crop, problem_type)
            write_folder(target, content, weights, provenance)
        backend.barrier()
    return target


def open_fit(stack: ExitStack, record: Record, target: Path, backend: Backend, timeout_seconds: float) -> RunDir | None:
    """Open the run folder of a fit until `stack` ends; None if the teacher is fitted. All ranks must call it.

    While another process holds the folder, wait for it. Ranks look together, so that no collective runs into its
    deadline meanwhile.
    """
    seen, since, waiting = "", time.monotonic(), False
    while True:
        outcome, folder, holder = FITTED, None, ""
        if backend.rank == 0 and not is_fitted(target):
            try:
                folder = stack.enter_context(open_run(record, 0))
                outcome = FITTED if is_fitted(target) else MINE  # it may have been fitted since the first look
            except FolderInUse as error:
                outcome, holder = IN_USE, str(error.wrong)
        mine = float(outcome if backend.rank == 0 else 0)
        outcome = int(backend.reduce_sum(torch.tensor([mine], device=backend.device)).item())
        if outcome == FITTED:
            return None
        if outcome == MINE:
            return folder or stack.enter_context(open_run(record, backend.rank))
        if backend.rank == 0:
            now = holder + _content(record.path)
            if now != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > timeout_seconds:
                wrong = f"{holder}, and has written nothing for {timeout_seconds:g} s"
                raise RunError("teacher.fit", wrong, "", "End that process, or raise backend.timeout_seconds")
            if not waiting:
                log.info("teacher: %s; waiting for the teacher that it fits", holder)
                waiting = True
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
