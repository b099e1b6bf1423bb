"""Runs of the real trainer in worlds of real processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from pieces import Trained, compared, tiny
from ranks import HERE, STEPS, World, start


@pytest.fixture(scope="session")
def config_file(photos, teacher, tmp_path_factory) -> Path:
    """A run of 20 steps, 3 an epoch, with a checkpoint every 5: the deaths of these
    tests fall into an epoch.
    """
    content = compared(
        photos,
        teacher,
        run={
            "steps": STEPS,
            "every": {"log": 1, "evaluate": STEPS, "checkpoint": 5},
            "keep": 9,
        },
        student={"args": {**tiny()["args"], "drop_rate": 0.1}},
        sifter={"kind": "outside.recording"},
        backend={"kind": "cpu", "threads": 1, "timeout_seconds": 20},
    )
    file = tmp_path_factory.mktemp("config") / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture
def changed_file(config_file, tmp_path) -> Callable[..., Path]:
    """Write that run with some sections replaced: `changed_file(backend={...})`."""

    def write(**sections: Any) -> Path:
        file = tmp_path / "changed" / "run.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(
            yaml.safe_dump({**yaml.safe_load(config_file.read_text()), **sections})
        )
        return file

    return write


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """Where this worker's runs lie."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def train(config_file, runs) -> Callable[..., Trained]:
    """Train in a world of so many ranks: `train("name", 2, "optimizer.zero=true")`; the
    same name resumes.
    """

    def run(
        name: str,
        ranks: int,
        *overrides: str,
        env: Mapping[str, str] = MappingProxyType({}),
        launcher: str = "torchrun",
        path: Sequence[Path] = (),
        backend: Mapping[str, Any] = MappingProxyType({}),
        into: Path | None = None,
    ) -> Trained:
        folder = into or runs
        record = folder / f"{name}.record"
        record.mkdir(exist_ok=True)
        file = config_file
        if backend:
            file = folder / f"{name}.yaml"
            file.write_text(
                yaml.safe_dump(
                    {
                        **yaml.safe_load(config_file.read_text()),
                        "backend": dict(backend),
                    }
                )
            )
        argv = [file, f"run.folder={folder}", f"run.name={name}", *overrides]
        world = start(
            "kd.cli.training:train",
            argv,
            ranks,
            {"KD_RECORD": str(record), **env},
            (HERE, *path),
            launcher=launcher,
        )
        return Trained(folder / name, world)

    return run


@pytest.fixture(scope="session")
def plain(train, once) -> Callable[..., Trained]:
    """Undisturbed runs, each made once for all workers: `plain(2,
    "optimizer.zero=true")`.
    """

    def run(ranks: int, *overrides: str) -> Trained:
        def build(folder: Path) -> Path:
            trained = train("whole", ranks, *overrides, into=folder)
            (folder / "world.json").write_text(json.dumps(trained.world.ended_well()))
            return trained.folder

        name = hashlib.sha256(json.dumps([ranks, *overrides]).encode()).hexdigest()[:12]
        folder = once(f"plain-{name}", build)
        return Trained(
            folder, World(*json.loads((folder.parent / "world.json").read_text()))
        )

    return run
