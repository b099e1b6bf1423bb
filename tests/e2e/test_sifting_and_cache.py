"""Sifting and the teacher's cache as a user sees them: the commands, what they print,
what they leave.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

VIEWS = ("teacher.cache.views=2", "run.epochs=4", "run.every.log=1")


def test_a_sifted_run_reports_what_it_saved(written, command, tmp_path):
    answer = command(
        "train",
        written(),
        "run.epochs=6",
        "sifter.kind=history",
        "sifter.keep=0.5",
        "data.batch_size=6",
    )
    assert answer.code == 0, answer
    report = (tmp_path / "runs" / "tiny" / "report.md").read_text()
    assert "## Sifting" in answer.out
    assert "## Sifting" in report
    counts = re.findall(r"^\| \d +\| +36 \| +(\d+) \|", report, re.MULTILINE)
    assert counts == ["36", "18", "18", "18", "18", "18"]
    assert (
        "(cold)" in report
    )  # the only full epoch is the first, which a warm one cannot be compared with
    assert "Not measured: no warm epoch was full" in report


def test_a_filled_cache_runs_no_teacher(written, command, tmp_path):
    filled = command("cache", written(), *VIEWS)
    assert filled.code == 0, filled
    assert re.search(
        r"holds 72 records, 0 are missing; the teacher ran on 72 images in \d",
        filled.out,
    )
    trained = command("train", written(), *VIEWS)
    assert trained.code == 0, trained
    assert "teacher_images 0 " in trained.out
    assert not re.search(r"teacher_images [1-9]", trained.out)
    (cache,) = (tmp_path / "runs" / "caches").iterdir()
    costs = [
        json.loads(line) for line in (cache / "costs.jsonl").read_text().splitlines()
    ]
    assert sum(row["outputs"] for row in costs) == 72
    spent = sum(row["cpu_seconds"] for row in costs)
    at_hand = json.loads((tmp_path / "runs" / "tiny" / "manifest.json").read_text())[
        "at_hand"
    ]
    assert at_hand == {
        "outputs": 72,
        "cpu_seconds": pytest.approx(spent),
    }  # what was stored earlier was not for nothing
    (cache / "costs.jsonl").unlink()
    assert command("train", written(), *VIEWS, "run.name=again").code == 0
    at_hand = json.loads((tmp_path / "runs" / "again" / "manifest.json").read_text())[
        "at_hand"
    ]
    assert at_hand == {"outputs": 72, "cpu_seconds": None}
    shutil.rmtree(cache)
    assert command("train", written(), *VIEWS).code == 0  # of a run that has ended
    at_hand = json.loads((tmp_path / "runs" / "tiny" / "manifest.json").read_text())[
        "at_hand"
    ]
    assert at_hand == {"outputs": 72, "cpu_seconds": pytest.approx(spent)}


def test_another_run_s_cache_is_refused_by_name(written, command, refused, tmp_path):
    path = f"teacher.cache.path={tmp_path / 'cache'}"
    assert command("cache", written(), *VIEWS, path).code == 0
    error = refused("train", written(), *VIEWS, path, "run.seed=1", "run.name=other")
    assert "was made with another seed (0; this run has 1)" in error


@pytest.mark.slow
def test_filling_that_was_killed_goes_on(written, command, tmp_path):
    """kill -9 as soon as the first record is there; torn or not, what follows
    is whole.
    """
    argv = [
        written(),
        *VIEWS,
        f"teacher.cache.path={tmp_path / 'cache'}",
        "data.augment.policy=rand-m9-mstd0.5",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    filling = subprocess.Popen(
        [sys.executable, "-m", "kd.cli", "cache", *argv],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    file = Path(tmp_path / "cache" / "view_0000.logits")
    deadline = time.monotonic() + 240
    while (
        not (file.exists() and any(file.read_bytes()))
        and time.monotonic() < deadline
        and filling.poll() is None
    ):
        time.sleep(0.001)
    filling.send_signal(signal.SIGKILL)
    assert filling.wait() in (-9, 0)  # 0: it was faster than the signal
    assert file.exists()
    assert command("cache", *argv).code == 0
    again = command("cache", *argv)
    assert again.code == 0, again
    assert "72 records, 0 are missing; the teacher ran on 0 images" in again.out


def test_beside_another_writer_a_run_reads_and_kd_cache_waits_for_its_turn(
    written, command, refused, tmp_path
):
    folder = tmp_path / "cache"
    argv = (*VIEWS, f"teacher.cache.path={folder}")
    filling = [
        sys.executable,
        "-m",
        "kd.cli",
        "cache",
        written(),
        *argv,
    ]  # a process of its own: it ends, and its lock
    subprocess.run(
        filling,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    os.truncate(folder / "view_0001.logits", 0)
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = refused("cache", written(), *argv)
        assert line.startswith(
            f"teacher.cache.path: '{folder}' is being written by another run, or may"
            " not be written"
        )
        trained = command("train", written(), *argv)
    assert trained.code == 0, trained
    assert f"teacher.cache: '{folder}' has another writer" in trained.out
    assert re.search(r"teacher_images [1-9]", trained.out)
    assert (folder / "view_0001.logits").stat().st_size == 0


def test_nothing_to_cache_is_one_line(written, command):
    refused = command("cache", written())
    assert refused.code == 2
    assert refused.err.startswith(
        "teacher.cache.views: there is nothing to cache. A teacher, and 1 view or more."
    )
