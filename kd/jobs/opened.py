"""A configuration, opened: the world of its backend, its data, its run folder and its teachers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd import config
from kd.core.contracts import Backend
from kd.core.errors import RunError
from kd.core.references import written
from kd.files.run_dir import RunDir
from kd.setup.build import Setting, distributed
from kd.setup.data import Data, open_data
from kd.setup.recipe import FREE, Recipe, Record, TeacherPlan, flatten
from kd.setup.teacher import Teachers

Obtain = Callable[[TeacherPlan, Data, Backend], Teachers]
"""Fits or loads the teachers of a plan; all ranks call it."""


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
    obtain: Obtain,
    started: float | None = None,
    fill: bool = True,
    examine: Callable[[Data], None] = lambda data: None,
) -> Iterator[Opened]:
    """Open what a job needs, what fails quickly first. All ranks call it.

    Args:
        recipe: the resolved configuration.
        obtain: gets its teachers, last of all: `obtain_teachers`, or `no_teachers`.
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
            teachers = obtain(recipe.teacher, data, backend)
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


def no_teachers(plan: TeacherPlan, data: Data, backend: Backend) -> Teachers:
    """Return none, for a job that asks none."""
    return Teachers(None, data)


@contextmanager
def open_run(record: Record, rank: int) -> Iterator[RunDir]:
    """Open the folder of a run and close it again; refuse one that holds another run, naming the keys that differ."""
    folder = RunDir(record.path, rank, record.keep)
    try:
        stored = folder.stored_config()
        folder.open(record.yaml, differences(folder.config_file, stored, record) if stored is not None else [])
        yield folder
    finally:
        folder.close()


def differences(file: Path | str, text: str, record: Record) -> list[str]:
    """List the keys in which a stored configuration computes something else."""
    from kd.study.finished import parse  # only where a folder holds a run

    stored = flatten(config.to_dict(parse(file, text, trust=True), values=True))
    return different_keys(stored, record.keys)


def different_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List `key (stored -> now)` wherever two configurations compute different things."""
    keys = [k for k in sorted(old.keys() | new.keys()) if not k.startswith(FREE)]
    return [f"{k} ({written(old.get(k))} -> {written(new.get(k))})" for k in keys if old.get(k) != new.get(k)]


def require_same(key: str, known: dict[str, Any], facts: dict[str, Any]) -> None:
    """Refuse to go on with a run on other data or with another teacher."""
    if key in known and key in facts and known[key] != facts[key]:
        wrong = f"this run was started with another {key} (its content hash differs)"
        allowed = "A run goes on with what it began with"
        raise RunError("run.name", wrong, allowed, "Choose another run.name, or restore what was there")
