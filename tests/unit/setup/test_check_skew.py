"""What `--check` says of uneven classes; listing alone, nothing is painted."""

from __future__ import annotations

from pathlib import Path

import pytest

from kd import config
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
