"""The store of decoded pixels as a user sees it: the same run, what it prints, what it
leaves, what it refuses.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from pieces import without_clocks


def rows(tmp_path, name: str, kind: str) -> list[dict]:
    parsed = [
        json.loads(line)
        for line in (
            (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        )
    ]
    return without_clocks([row for row in parsed if row["kind"] == kind])


@pytest.mark.slow
def test_evaluating_and_exporting_need_no_store(written, command, tmp_path):
    path = written(data={"store": "disk", "crop_pct": 0.8})
    trained = command("train", path)
    assert trained.code == 0, trained
    before = sorted((tmp_path / "runs" / "stores").rglob("*"))
    evaluated = command("evaluate", tmp_path / "runs" / "tiny")
    assert evaluated.code == 0, evaluated
    assert "store: " not in evaluated.out
    best = max(row["accuracy"] for row in rows(tmp_path, "tiny", "val"))
    assert re.search(rf"^accuracy +{best:.4f}  95 %: ", evaluated.out, re.MULTILINE)
    assert command("export", tmp_path / "runs" / "tiny").code == 0
    assert sorted((tmp_path / "runs" / "stores").rglob("*")) == before


def test_the_fit_of_the_teacher_and_the_baseline_share_it(
    settings, written, command, photos, tmp_path
):
    teacher = {"model": "vit_tiny_patch16_224", "args": settings["student"]["args"]}
    fit = {"epochs": 1, "folder": str(tmp_path / "teachers")}
    path = written(
        run={"baseline": True},
        data={"store": "ram"},
        teacher={**teacher, "fit": fit, "min_accuracy": 0},
    )
    answer = command("train", path)
    assert answer.code == 0, answer
    assert answer.out.count("store: about") == 1


@pytest.mark.slow
def test_filling_that_was_killed_goes_on(written, command, tmp_path):
    """kill -9 as soon as the first slot is there; torn or not, what follows is the run
    without a store.
    """
    argv = [
        written(),
        "data.store=disk",
        "data.workers=1",
        "run.name=killed",
        "run.epochs=3",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    filling = subprocess.Popen(
        [sys.executable, "-m", "kd.cli", "train", *argv],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and filling.poll() is None:
        if any(
            path.stat().st_blocks
            for path in (tmp_path / "runs" / "stores").glob("train-*/pixels")
        ):
            break
        time.sleep(0.001)
    filling.send_signal(signal.SIGKILL)
    assert filling.wait() in (-9, 0)  # 0: it was faster than the signal
    assert list((tmp_path / "runs" / "stores").glob("train-*/pixels"))
    assert command("train", *argv).code == 0
    assert command("train", *argv, "run.name=plain", "data.store=none").code == 0
    assert rows(tmp_path, "killed", "val")[-1] == rows(tmp_path, "plain", "val")[-1]


def test_a_resumed_run_keeps_its_store(written, refused, command):
    assert command("train", written(), "data.store=disk").code == 0
    line = refused("train", written(), "data.store=none", "run.epochs=3")
    assert "data.store (disk -> none)" in line


def test_a_cache_knows_the_store_that_its_pixels_went_through(
    written, command, tmp_path
):
    argv = (
        written(),
        "teacher.cache.views=2",
        f"teacher.cache.path={tmp_path / 'cache'}",
    )
    assert command("cache", *argv, "data.store=disk").code == 0
    answer = command("train", *argv, "data.store=ram", "run.name=same-pixels")
    assert answer.code == 0, answer
    assert not re.search(r"teacher_images [1-9]", answer.out)
    refused = command("train", *argv, "run.name=other-pixels")
    assert refused.code == 2
    assert "was made with another transform" in refused.err


def test_check_says_what_a_store_may_take(written, command):
    answer = command("train", written(), "data.store=disk", "--check")
    assert answer.code == 0, answer
    assert re.search(r"^store     disk: at most \d", answer.out, re.MULTILINE)
    views = command("train", written(), "data.store=views", "data.views=2", "--check")
    assert re.search(r"^store     views: \d", views.out, re.MULTILINE), views
    assert not re.search(
        r"^store ", command("train", written(), "--check").out, re.MULTILINE
    )
