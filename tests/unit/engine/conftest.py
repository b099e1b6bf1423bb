"""A real run, built from a configuration, that leaves its rows in memory or in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kd import config
from kd.artifacts.memory import Memory
from kd.artifacts.run_dir import RunDir
from kd.engine.run import Run
from kd.jobs.teach import obtain_teacher
from kd.progress.console import Console
from kd.setup.build import build_backend, build_run
from kd.setup.data import open_sources
from kd.setup.recipe import resolve


class Made(NamedTuple):
    run: Run
    store: Any


@pytest.fixture
def make(settings) -> Callable[..., Made]:
    """Build a run: `make("optimizer.lr=1", folder=path)`; what a job does, without its checks."""

    def made(*overrides: str, folder: Path | None = None, logger: Any = None) -> Made:
        chosen = config.load(settings, overrides)
        data, backend = open_sources(chosen.data), build_backend(chosen.backend)
        teacher, data = obtain_teacher(resolve(chosen), data, backend)
        store = Memory() if folder is None else RunDir(folder, keep=chosen.run.keep)
        if isinstance(store, RunDir):
            store.open(config.dump(chosen))
        run = build_run(resolve(chosen), data, backend, teacher, store, logger or Console("", quiet=True)).run
        return Made(run, store)

    return made
