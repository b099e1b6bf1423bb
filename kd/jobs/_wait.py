"""Several runs that need the same teacher: one fits it, the others wait and reuse it."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from kd.artifacts.run_dir import RunDir
from kd.contracts import Backend
from kd.errors import FolderInUse, RunError
from kd.jobs._folder import open_run
from kd.setup.recipe import Recipe

POLL = 0.5
"""Seconds between two looks at the folder."""
MINE, FITTED, IN_USE = 0, 1, 2
log = logging.getLogger("kd")


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
        if file.name != ".lock":  # a look at it changes nothing, but its time
            found.append(f"{file.name} {state.st_size} {state.st_mtime_ns}")
    return "\n".join(found)
