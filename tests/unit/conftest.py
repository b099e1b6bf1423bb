"""A real run, built from a configuration, that leaves its rows in memory or in a
folder.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kd import config
from kd.engine.run import Run
from kd.files.run_dir import Memory, RunDir
from kd.jobs.progress.console import Console
from kd.jobs.train import obtain_teachers
from kd.setup.build import RunContext, build_backend, build_run
from kd.setup.build_teacher import Teachers
from kd.setup.data import open_sources
from kd.setup.recipe import resolve


class Made(NamedTuple):
    run: Run
    store: Any
    facts: dict[str, Any]


@pytest.fixture
def make(settings) -> Callable[..., Made]:
    """Build a run: `make("optimizer.lr=1", folder=path)`; what a job does, without its
    checks.

    `change` makes other teachers of those that the configuration names.
    """

    def made(
        *overrides: str,
        folder: Path | None = None,
        logger: Any = None,
        change: Callable[[Teachers], Teachers] = lambda teachers: teachers,
    ) -> Made:
        recipe = resolve(config.load(settings, overrides), folder)
        data, backend = open_sources(recipe.data), build_backend(recipe.backend)
        teachers = change(obtain_teachers(recipe, data, backend))
        store = Memory() if folder is None else RunDir(folder, keep=recipe.record.keep)
        if isinstance(store, RunDir):
            store.open(recipe.record.yaml)
        setting = RunContext(recipe, teachers, backend)
        console = logger or Console("", quiet=True)
        built = build_run(setting, store, console)
        return Made(built.run, store, built.facts)

    return made
