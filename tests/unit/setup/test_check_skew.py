"""What `--check` says of uneven classes and of files that are not read; listing alone, nothing is painted."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

import kd
from kd import config
from kd.datasets._decode import HEIF
from kd.jobs.check import check
from kd.setup.recipe import resolve


@pytest.mark.parametrize(
    ("imbalance", "told"),
    [(1, ""), (3, ""), (30, "the 3 largest have 62 % of the images (410 to 221 each, the smallest 14)")],
)
def test_uneven_classes_are_told(settings: dict, tmp_path: Path, imbalance: int, told: str):
    data = {"kind": "food_mini", "root": str(tmp_path), "train_images": 410, "imbalance": imbalance}
    ours = {**settings, "data": {**data, "image_size": 16, "batch_size": 8}, "teacher": {}, "losses": [{"kind": "ce"}]}
    lines = {line.split()[0]: line for line in check(resolve(config.load(ours))).splitlines()}
    assert ("classes" in lines) == bool(told)
    assert told in lines.get("classes", "")
    assert not list(tmp_path.iterdir())


def test_files_that_are_not_read_are_told_by_check_and_by_the_run(settings: dict, photos: Path, tmp_path: Path, caplog):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    for name in ("train/plum/1.HEIC", "train/plum/2.HEIC", "val/fig/notes.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"x")
    ours = {**settings, "data": {**settings["data"], "root": str(root)}}
    if HEIF:
        pytest.skip("pillow-heif is installed: the files would be read")
    heic = "2 files are not read: 2 .HEIC (pillow-heif reads them: pip install 'kd[heic]')"
    told = [heic, "1 folder has no image and is no class: train/plum", "1 file is not read: 1 .txt"]
    checked = check(resolve(config.load(ours))).splitlines()
    assert [line.strip() for line in checked if "no image and" in line or "not read" in line] == told
    with caplog.at_level(logging.INFO, "kd"):
        kd.train(ours, "run.steps=1", "run.epochs=1")
    assert [message for message in caplog.messages if message.startswith("data: ")] == [
        f"data: {line}" for line in told
    ]
