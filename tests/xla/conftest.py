"""The engine on real torch_xla, on the CPU. `make test-xla` runs these; elsewhere they
are skipped with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from pieces import Trained, compared

STEPS = 20
os.environ.setdefault("PJRT_DEVICE", "CPU")
if find_spec("torch_xla") is not None:
    # autograd counts the devices at its first backward, which here would be the
    # fixture's teacher on the CPU
    import torch_xla

    torch_xla.device()
# torch_xla's own, about python and torch
IGNORED = ("ignore::DeprecationWarning", "ignore::FutureWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests, and skip them where there is no torch_xla."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xla)
            for text in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(text))
            if find_spec("torch_xla") is None:
                item.add_marker(
                    pytest.mark.skip(
                        reason="torch_xla is not installed; `make test-xla` installs it"
                    )
                )


@pytest.fixture(scope="session")
def run_file(photos, teacher, tmp_path_factory) -> Path:
    """A run of 20 steps of two micro-batches, three steps an epoch; the validation
    split ends in a padded batch.
    """
    import yaml

    every = {"log": 1, "evaluate": STEPS, "checkpoint": 10}
    content = compared(
        photos,
        teacher,
        run={"steps": STEPS, "every": every, "keep": 9},
        data={"micro_batch": 6},
        backend={},
    )
    file = tmp_path_factory.mktemp("config") / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture(scope="session")
def train(run_file, tmp_path_factory) -> Callable[..., Trained]:
    """Train in this process: `train("xla", "optimizer.zero=true")`; the same folder
    resumes.
    """
    from kd import config
    from kd.jobs.train import train as job

    def run(kind: str, *overrides: str, folder: Path | None = None) -> Trained:
        folder = folder or tmp_path_factory.mktemp("runs") / "run"
        place = [f"run.folder={folder.parent}", f"run.name={folder.name}"]
        job(config.load(run_file, [f"backend.kind={kind}", *place, *overrides]))
        return Trained(folder)

    return run


@pytest.fixture(scope="session")
def plain(train) -> Callable[..., Trained]:
    """Runs that several tests look at, each made once."""
    runs: dict[tuple[str, ...], Trained] = {}

    def run(*key: str) -> Trained:
        if key not in runs:
            runs[key] = train(*key)
        return runs[key]

    return run
