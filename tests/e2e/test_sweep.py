"""A sweep as a user starts it: killed three times, in two processes, with a pruner,
over a range, for a front.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import optuna
import pytest
import yaml
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from pieces import base

import kd

AXES = ("optimizer.lr=5e-3,1e-6",)
PATIENCE = 1200.0
"""Seconds: on a machine that does much else a process takes minutes to start."""


def started(
    folder: Path, words: Sequence[str], out: str = "out.txt"
) -> subprocess.Popen:
    """Start the command in a process group of its own."""
    argv = [sys.executable, "-m", "kd", "sweep", "tiny.yaml", *words]
    with (folder / out).open("ab") as file:
        return subprocess.Popen(
            argv, cwd=folder, stdout=file, stderr=file, start_new_session=True
        )


def killed_when(
    folder: Path, moment: Callable[[Path], object], axes: Sequence[str] = AXES
) -> None:
    """Start the sweep, and kill it and its trials once `moment` is true."""
    process = started(folder, axes)
    until = time.monotonic() + PATIENCE
    try:
        while not moment(folder / "runs" / "tiny_sweep"):
            assert process.poll() is None, (folder / "out.txt").read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def ended(storage: object) -> list[FrozenTrial]:
    """Return the trials of all studies that have ended; `storage`: Optuna's, or the
    folder of a sweep.
    """
    if isinstance(storage, Path):
        if not (storage / "journal.log").is_file():
            return []
        storage = optuna.storages.JournalStorage(
            JournalFileBackend(str(storage / "journal.log"))
        )
    studies = [
        optuna.load_study(study_name=name, storage=storage)
        for name in optuna.get_all_study_names(storage)
    ]
    return [
        trial
        for study in studies
        for trial in study.trials
        if trial.state == TrialState.COMPLETE
    ]


def evaluated(sweep: Path) -> list[Counter]:
    """Return how often each run of a sweep was evaluated at each step."""
    return [
        Counter(re.findall(r"\| step (\d+) .* val ", log.read_text()))
        for log in sweep.glob("*_*.log")
    ]


def small(folder: Path, photos: Path, **run: object) -> None:
    """Write tiny.yaml."""
    folder.mkdir(exist_ok=True)
    settings = base(photos, Path())
    settings["run"] |= {"epochs": 3, "every": {"log": 2, "evaluate": 2}, **run}
    settings["teacher"]["fit"]["epochs"] = 1
    settings["teacher"]["min_accuracy"] = 0.0
    settings["data"]["test_fraction"] = 0.3
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
def test_killed_three_times_the_table_is_the_same(photos, tmp_path):
    outs = []
    for name in ("calm", "killed"):
        folder = tmp_path / name
        small(folder, photos)
        if name == "killed":
            killed_when(folder, lambda sweep: list(sweep.glob("*/checkpoints/step_*")))
            assert not ended(folder / "runs" / "tiny_sweep")
            killed_when(
                folder,
                lambda sweep: (
                    len(ended(sweep)) == 1
                    and len(list(sweep.glob("*/metrics.jsonl"))) == 2
                ),
            )
            killed_when(
                folder,
                lambda sweep: (
                    len(ended(sweep)) == 2 and list(sweep.glob("*/metrics.jsonl"))[2:]
                ),
            )
            assert len(ended(folder / "runs" / "tiny_sweep")) == 2
        process = started(folder, AXES)
        assert process.wait(PATIENCE) == 0, (folder / "out.txt").read_text()
        outs.append(folder / "runs" / "tiny_sweep")
    calm, killed = outs
    assert (killed / "sweep.md").read_text() == (calm / "sweep.md").read_text()
    assert (killed / "best.yaml").read_text() == (calm / "best.yaml").read_text()
    facts = [
        {trial.user_attrs["trial"]: trial for trial in ended(sweep)} for sweep in outs
    ]
    assert facts[0].keys() == facts[1].keys()
    for name, trial in facts[0].items():
        killed_trial = facts[1][name]
        assert (trial.values, trial.params, trial.intermediate_values) == (
            killed_trial.values,
            killed_trial.params,
            killed_trial.intermediate_values,
        )
        assert killed_trial.user_attrs.items() >= trial.user_attrs.items()
    assert sum("continues" in trial.user_attrs for trial in facts[1].values()) >= 2
    # one teacher and one cache for the trials; each fresh seed has views, and so a
    # cache, of its own
    assert len(list((calm.parent / "caches").iterdir())) == 3
    assert (
        len(
            [path for path in (calm.parents[1] / "teachers").iterdir() if path.is_dir()]
        )
        == 1
    )
    by_values = {
        trial.params["optimizer.lr"]: trial
        for trial in ended(calm)
        if len(trial.params) == 1
    }
    assert len(by_values["0.005"].user_attrs["interval"]) == 2
    tested = [
        json.loads((run / "scored.json").read_text())["split"]
        for run in calm.glob("*_*")
        if (run / "scored.json").is_file()
    ]
    assert sorted(tested) == ["test"] * 3 + [
        "val"
    ]  # the best and the two fresh runs; the other trial
    assert (
        "On test images, which chose nothing, the best has"
        in (calm / "sweep.md").read_text()
    )
    best = kd.load_config(calm / "best.yaml")
    assert (best.run.name, best.run.folder, best.optimizer.lr) == (
        "tiny_best",
        "runs",
        5e-3,
    )


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
def test_two_processes_share_the_trials_and_prune_the_hopeless_one(photos, tmp_path):
    small(tmp_path, photos, epochs=60, every={"log": 100, "evaluate": 10})
    pruner = ["--pruner", "threshold(lower=0.5, n_warmup_steps=2)"]
    words = ["optimizer.lr=5e-3,1e-7,4e-3", "--storage", "sqlite:///trials.db", *pruner]
    processes = [started(tmp_path, words, f"{number}.txt") for number in range(2)]
    texts = []
    for number, process in enumerate(processes):
        code = process.wait(PATIENCE)
        texts.append((tmp_path / f"{number}.txt").read_text())
        assert code == 0, texts
    tables = [text[text.index("\n| ") :] for text in texts]
    assert tables[0] == tables[1]
    assert all(": accuracy " in text or "pruned at" in text for text in texts), (
        "each trained some"
    )
    sweep = tmp_path / "runs" / "tiny_sweep"
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    good = [
        trial.params["optimizer.lr"] for trial in ended(url) if len(trial.params) == 1
    ]
    assert sorted(good) == ["0.004", "0.005"]
    (line,) = (line for line in tables[0].splitlines() if line.startswith("| 1e-07"))
    assert "pruned at" in line
    (hopeless,) = sweep.glob("lr-1e-07_*/metrics.jsonl")
    assert (
        max(json.loads(line)["step"] for line in hopeless.read_text().splitlines())
        < 240
    )
    counts = evaluated(sweep)
    assert len(counts) == 5
    assert all(counts)
    assert max(count for counter in counts for count in counter.values()) == 1, (
        "nothing was trained twice"
    )


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE)
def test_a_range_is_searched_for_a_front_and_goes_on(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small(tmp_path, photos, epochs=1)
    words = [
        "tiny.yaml",
        "optimizer.lr=loguniform(1e-4,1e-2)",
        "student.args.depth=integers(1,3)",
    ]
    result = kd.sweep(*words, trials=2, objectives="accuracy,ms,mb", sampler="random")
    study = result.study
    assert [direction.name for direction in study.directions] == [
        "MAXIMIZE",
        "MINIMIZE",
        "MINIMIZE",
    ]
    for trial in study.trials:
        accuracy, ms, mb = trial.values
        assert (accuracy, ms, mb) == tuple(
            trial.user_attrs[key] for key in ("accuracy", "ms", "mb")
        )
        assert 1e-4 <= trial.params["optimizer.lr"] <= 1e-2
        assert 0.01 < mb < 1
    best = {trial.user_attrs["trial"] for trial in study.best_trials}
    marked = {row["trial"] for row in result.rows if row["frontier"]}
    assert best
    assert marked, "by times of all models in turns"
    assert len(study.trials_dataframe()) == 2
    values = [trial.values for trial in study.trials]
    again = kd.sweep(*words, trials=3, objectives="accuracy,ms,mb", sampler="random")
    assert {row["trial"] for row in again.rows} > {row["trial"] for row in result.rows}
    assert [trial.values for trial in again.study.trials][:2] == values, (
        "not trained again"
    )
    assert len(again.study.trials) == 3
    assert (
        max(count for counter in evaluated(result.folder) for count in counter.values())
        == 1
    )
