"""A configuration, opened: the world of its backend, its data, its run folder and its teachers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from kd.files.run_dir import RunDir
from kd.jobs.folder import open_run
from kd.jobs.teach import obtain_teachers
from kd.setup.build import Setting, distributed
from kd.setup.data import Data, open_data
from kd.setup.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Opened:
    """What a job works on."""

    setting: Setting
    """Teachers with their data, and the backend."""
    folder: RunDir | None
    """The run folder, held against other processes; None for a job that writes none."""


@contextmanager
def opened(
    recipe: Recipe,
    started: float | None = None,
    fill: bool = True,
    examine: Callable[[Data], None] = lambda data: None,
) -> Iterator[Opened]:
    """Open what a job needs, what fails quickly first; a teacher without a checkpoint is fitted. All ranks call it.

    Args:
        recipe: the resolved configuration.
        started: where the run folder is written: when its command began, by `time.perf_counter`.
        fill: keep decoded pixels where `data.store` says so; not for a job that reads each image once.
        examine: is called with the data before a teacher is loaded; may raise.
    """
    with distributed(recipe.backend) as backend:
        data = open_data(recipe.data, backend, fill)
        examine(data)
        with ExitStack() as stack:
            folder = None
            if started is not None:
                folder = stack.enter_context(open_run(recipe.record, backend.rank))
                stack.enter_context(billed(folder, started))
            teachers = obtain_teachers(recipe.teacher, data, backend)
            yield Opened(Setting(teachers, backend, recipe.backend), folder)


@contextmanager
def billed(folder: RunDir, started: float) -> Iterator[None]:
    """Record how long this start and all earlier ones took, from the command on, which is what a rented machine costs.

    Not counted: the time of a start whose process was killed.
    """
    before = float(folder.manifest().get("billable_seconds", 0.0))
    try:
        yield
    finally:
        folder.record(billable_seconds=round(before + time.perf_counter() - started, 3))
