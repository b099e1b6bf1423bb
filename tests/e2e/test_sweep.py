"""A sweep as a user starts it: killed three times, its table is that of an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from pieces import base

import kd

AXES = ("optimizer.lr=5e-3,1e-6",)
PATIENCE = 1200.0
"""Seconds: on a machine that does much else a process takes minutes to start."""


def started(folder: Path, axes: Sequence[str]) -> subprocess.Popen:
    """Start the command in a process group of its own."""
    argv = [sys.executable, "-m", "kd", "sweep", "tiny.yaml", *axes]
    with (folder / "out.txt").open("ab") as out:
        return subprocess.Popen(argv, cwd=folder, stdout=out, stderr=out, start_new_session=True)


def killed_when(folder: Path, moment: Callable[[Path], object], axes: Sequence[str] = AXES) -> None:
    """Start the sweep, and kill it and its trials once `moment` is true."""
    process, until = started(folder, axes), time.monotonic() + PATIENCE
    try:
        while not moment(folder / "runs" / "tiny_sweep"):
            assert process.poll() is None, (folder / "out.txt").read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def lines(folder: Path) -> list[dict]:
    file = folder / "journal.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
def test_killed_three_times_the_table_is_the_same(photos, tmp_path):
    outs = []
    for name in ("calm", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        settings = base(photos, Path())
        settings["run"] |= {"epochs": 3, "every": {"log": 2, "evaluate": 2}}
        settings["teacher"]["fit"]["epochs"] = 1
        settings["teacher"]["min_accuracy"] = 0.0
        settings["data"]["test_fraction"] = 0.3
        (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
        if name == "killed":
            killed_when(folder, lambda sweep: list(sweep.glob("*/checkpoints/step_*")))
            assert not lines(folder / "runs" / "tiny_sweep")
            killed_when(folder, lambda sweep: len(lines(sweep)) == 1 and len(list(sweep.glob("*/metrics.jsonl"))) == 2)
            killed_when(folder, lambda sweep: len(lines(sweep)) == 2 and list(sweep.glob("*/metrics.jsonl"))[2:])
            assert len(lines(folder / "runs" / "tiny_sweep")) == 2
        process = started(folder, AXES)
        assert process.wait(PATIENCE) == 0, (folder / "out.txt").read_text()
        outs.append(folder / "runs" / "tiny_sweep")
    calm, killed = outs
    assert (killed / "sweep.md").read_text() == (calm / "sweep.md").read_text()
    assert (killed / "best.yaml").read_text() == (calm / "best.yaml").read_text()
    assert {row["trial"]: row for row in lines(killed)} == {row["trial"]: row for row in lines(calm)}
    # one teacher and one cache for the trials; each fresh seed has views, and so a cache, of its own
    assert len(list((calm.parent / "caches").iterdir())) == 3
    assert len([one for one in (calm.parents[1] / "teachers").iterdir() if one.is_dir()]) == 1
    by_values = {tuple(row["values"].values()): row for row in lines(calm)}
    assert len(by_values["0.005",]["interval"]) == 2
    tested = [
        json.loads((run / "scored.json").read_text())["split"]
        for run in calm.glob("*_*")
        if (run / "scored.json").is_file()
    ]
    assert sorted(tested) == ["test"] * 3 + ["val"]  # the best and the two fresh runs; the other trial
    assert "On test images, which chose nothing, the best has" in (calm / "sweep.md").read_text()
    best = kd.load_config(calm / "best.yaml")
    assert (best.run.name, best.run.folder, best.optimizer.lr) == ("tiny_best", "runs", 5e-3)
