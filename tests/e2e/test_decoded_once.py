"""The store of decoded pixels as a user sees it: the same run, what it prints, what it leaves, what it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from pieces import slow, without_clocks

from kd.core.host import cores


def rows(tmp_path, name: str, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return without_clocks([row for row in found if row["kind"] == kind])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("store", ["ram", "disk"])
@pytest.mark.slow
def test_small_images_train_to_the_same_bits(written, command, tmp_path, store, workers):
    """The photos of 20 px are not larger than training at 16 px needs: nothing differs, from no worker on."""
    for name, kind, count in (("without", "none", 0), ("with", store, workers), ("again", store, 0)):
        done = command("train", written(), f"run.name={name}", f"data.store={kind}", f"data.workers={count}")
        assert done.code == 0, done
        assert ("store: about 0.2 MiB of decoded images " in done.out) == (kind != "none")
    for name in ("with", "again"):
        for kind in ("train", "val"):
            assert rows(tmp_path, name, kind) == rows(tmp_path, "without", kind)
    if store == "disk":
        assert "stores', 0.2 MiB of it there already" in done.out


@pytest.mark.slow
def test_evaluating_and_exporting_need_no_store(written, command, tmp_path):
    path = written(data={"store": "disk", "eval_crop": 0.8})
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


def test_the_fit_of_the_teacher_and_the_baseline_share_it(settings, written, command, photos, tmp_path):
    teacher = {"model": "vit_tiny_patch16_224", "args": settings["student"]["args"]}
    fit = {"epochs": 1, "folder": str(tmp_path / "teachers")}
    path = written(run={"baseline": True}, data={"store": "ram"}, teacher={**teacher, "fit": fit, "min_accuracy": 0})
    done = command("train", path)
    assert done.code == 0, done
    assert done.out.count("store: about") == 1


@pytest.mark.slow
def test_filling_that_was_killed_goes_on(written, command, tmp_path):
    """kill -9 as soon as the first slot is there; torn or not, what follows is the run without a store."""
    argv = [written(), "data.store=disk", "data.workers=1", "run.name=killed", "run.epochs=3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    filling = subprocess.Popen(
        [sys.executable, "-m", "kd.cli", "train", *argv], env=environment, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and filling.poll() is None:
        if any(path.stat().st_blocks for path in (tmp_path / "runs" / "stores").glob("train-*/pixels")):
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


def test_a_cache_knows_the_store_that_its_pixels_went_through(written, command, tmp_path):
    argv = (written(), "teacher.cache.views=2", f"teacher.cache.path={tmp_path / 'cache'}")
    assert command("cache", *argv, "data.store=disk").code == 0
    answer = command("train", *argv, "data.store=ram", "run.name=same-pixels")
    assert answer.code == 0, answer
    assert not re.search(r"teacher_images [1-9]", answer.out)
    refused = command("train", *argv, "run.name=other-pixels")
    assert refused.code == 2
    assert "was made with another transform" in refused.err


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.store=tape", "data.store: is 'tape'"),
        ("data.store_size=15", "data.store_size: is 15, but data.image_size is 16. 0, or at least 16"),
    ],
)
def test_bad_keys(written, refused, override, line):
    assert refused("train", written(), override).startswith(line)


def test_a_place_that_cannot_be_written_is_one_line(written, refused, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "stores").write_text("in the way")
    assert refused("train", written(), "data.store=disk").startswith("data.store: cannot write '")


@pytest.mark.parametrize("on_corrupt", ["error", slow("skip")])
def test_corrupt_images_are_what_they_were(written, command, photos, tmp_path, on_corrupt):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    (root / "train" / "fig" / "03.jpg").write_bytes(b"")
    path, told = written(data={"root": str(root), "on_corrupt": on_corrupt}), []
    for store in ("none", "disk", "ram"):
        done = command("train", path, f"run.name={store}", f"data.store={store}")
        told.append((done.code, done.err, re.findall(r"images could not be decoded.*", done.out)))
    assert told[0] == told[1] == told[2]
    assert told[0][0] == (2 if on_corrupt == "error" else 0)


def test_check_says_what_a_store_may_take(written, command):
    done = command("train", written(), "data.store=disk", "--check")
    assert done.code == 0, done
    assert re.search(r"^store     disk: at most \d", done.out, re.MULTILINE)
    assert not re.search(r"^store ", command("train", written(), "--check").out, re.MULTILINE)


def test_the_number_of_workers_is_recorded(written, command, tmp_path):
    done = command("train", written(data={"workers": "auto"}), "run.epochs=1")
    assert done.code == 0, done
    manifest = json.loads((tmp_path / "runs" / "tiny" / "manifest.json").read_text())
    assert manifest["workers"] == (1 if cores() > 2 else 0)
