"""Runs that need the same teacher, and images that only one rank has read."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import yaml
from pieces import fitted, wait_until
from ranks import HERE, environment, start, zygote

from kd.files.storage import lock

OURS = "data.kind=outside.signalling"


@pytest.fixture
def fit_file(changed_file, config_file, tmp_path):
    """A configuration whose teacher is fitted below `tmp_path`."""
    run = {**yaml.safe_load(config_file.read_text())["run"], "folder": str(tmp_path)}
    return changed_file(teacher=fitted(tmp_path / "teachers"), run=run)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow
def test_a_run_waits_for_the_teacher_that_another_fits(fit_file, tmp_path, ranks):
    """The fit takes longer than the deadline, which counts only while it makes no
    progress.
    """
    argv = [sys.executable, "-m", "kd.cli", "teach", str(fit_file), OURS]
    environ = {**environment(), "KD_SLOW": "0.07"}
    environ["PYTHONPATH"] += f":{HERE}"
    zygote()  # whose start may take longer than the fit
    first = subprocess.Popen(
        argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        wait_until(lambda: list(tmp_path.glob("teachers/*/metrics.jsonl")), first)
        second = start(
            "kd.cli.training:teach",
            [fit_file, OURS, "backend.timeout_seconds=4"],
            ranks,
        )
        output = first.communicate(timeout=60)[0]
    finally:
        if first.poll() is None:
            first.kill()
            first.wait()
    assert first.returncode == 0, output
    second.ended_well()
    assert second.logs[0].count("waiting for the teacher that it fits") == 1
    assert "teacher: reusing" in second.logs[0]
    assert all(
        log.splitlines()[-1] == output.splitlines()[-1] for log in second.logs
    )  # the folder
    assert len(list(tmp_path.glob("teachers/*/export"))) == 1


@pytest.mark.slow
def test_a_fit_without_progress_is_not_waited_for(fit_file, tmp_path):
    argv = [fit_file, OURS, "backend.timeout_seconds=2"]
    stopped = start(
        "kd.cli.training:teach", argv, env={"KD_SIGNAL": "SIGTERM:train:50"}
    )
    assert stopped.codes == [75]
    (folder,) = (tmp_path / "teachers").iterdir()
    file = lock(folder / ".lock", "run.name")
    assert file is not None
    refused = start("kd.cli.training:teach", argv)
    file.close()
    assert refused.codes == [2]
    last = refused.logs[0].splitlines()[-1]
    assert last.startswith("teacher.fit: process ")
    assert "has written nothing for 2 s" in last
    start("kd.cli.training:teach", argv).ended_well()


def test_the_list_of_corrupt_images_is_of_all_ranks(train, photos, tmp_path):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    broken = (
        sorted(root.glob("train/*/*.jpg"))[::6] + sorted(root.glob("val/*/*.jpg"))[:2]
    )
    for file in broken:
        file.write_bytes(b"not an image")
    overrides = (
        "run.steps=3",
        "sifter.kind=none",
        f"data.root={root}",
    )  # each image is read once
    overrides += ("data.on_corrupt=skip", "data.max_skipped=1")
    run = train("corrupt", 2, *overrides)
    run.world.ended_well()
    listed = run.manifest()["unreadable"]
    assert len(listed) == len(broken) == 8
