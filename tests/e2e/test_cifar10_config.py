"""configs/cifar10.yaml as it is shipped, on pictures of that size, for a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_fits_trains_and_scores(command, tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    for split, images in (("train", 33), ("test", 3)):
        for label in range(10):
            folder = tmp_path / "data" / split / f"class_{label}"
            folder.mkdir(parents=True)
            for i in range(images):
                pixels = generator.integers(0, 256, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{i:04d}.jpg")
    monkeypatch.chdir(ROOT)
    run, teachers = tmp_path / "runs", tmp_path / "teachers"
    keys = [f"data.root={tmp_path / 'data'}", "run.steps=2", "teacher.fit.steps=2", "teacher.min_accuracy=0"]
    answer = command(
        "train",
        "configs/cifar10.yaml",
        *keys,
        f"run.folder={run}",
        f"teacher.fit.folder={teachers}",
        "backend.threads=1",
    )
    assert answer.code == 0, answer
    manifest = json.loads((run / "cifar10" / "manifest.json").read_text())
    assert manifest["parameters"] == {"student": 927_010, "teacher": 2 * 2_570_290}
    scored = json.loads((run / "cifar10" / "scored.json").read_text())
    assert (scored["split"], scored["images"]) == ("test", 30)
