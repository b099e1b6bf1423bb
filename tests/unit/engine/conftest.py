"""A real run, built from a configuration, that leaves its rows in memory or in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kd import build, config
from kd.artifacts.memory import Memory
from kd.artifacts.run_dir import RunDir
from kd.engine.run import Run
from kd.report.console import Console


class Made(NamedTuple):
    run: Run
    sink: Any


@pytest.fixture
def make(settings) -> Callable[..., Made]:
    """Build a run: `make("optimizer.lr=1", folder=path)`; what a job does, without its checks."""

    def made(*overrides: str, folder: Path | None = None, watcher: Any = None) -> Made:
        chosen = config.load(settings, overrides)
        data, backend = build.data(chosen), build.backend(chosen)
        teacher = build.teacher_model(chosen, data.train.classes, "features" in build.needs(chosen))
        sink = Memory() if folder is None else RunDir(folder, keep=chosen.run.keep)
        if isinstance(sink, RunDir):
            sink.open(config.dump(chosen))
        run, _ = build.run(chosen, data, backend, teacher, sink, watcher or Console("", quiet=True))
        return Made(run, sink)

    return made
