"""A data source is one file beside kd's: `kd init` finds it by its `recognizes`, and a run learns from it."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from pieces import merged, tiny

import kd
import kd.parts.datasets
from kd.parts import registry


@pytest.fixture
def arrays(monkeypatch):
    monkeypatch.setattr(
        kd.parts.datasets, "__path__", [*kd.parts.datasets.__path__, str(Path(__file__).parent / "datasets")]
    )


def test_kd_init_finds_it_and_a_run_learns_from_it(arrays, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "arrays" in registry.names("datasets")
    rng, folder = np.random.default_rng(0), tmp_path / "pictures"
    folder.mkdir()
    for split, count in (("train", 24), ("val", 8)):
        of = np.array(["dark", "light"])[np.arange(count) % 2]
        pixels = rng.integers(0, 60, (count, 20, 20, 3)) + 180 * (of == "light")[:, None, None, None]
        np.savez(folder / f"{split}.npz", pixels=pixels.astype(np.uint8), of=of)
    answer = command("init", folder, "-o", tmp_path / "first.yaml")
    assert answer.code == 0, answer
    made = yaml.safe_load((tmp_path / "first.yaml").read_text())
    assert {key: made["data"][key] for key in ("kind", "folder")} == {"kind": "arrays", "folder": str(folder)}
    assert "2 classes of 12 to 12 images" in (tmp_path / "first.yaml").read_text()
    quick = {
        "run": {"epochs": 2, "name": "quick", "folder": str(tmp_path)},
        "data": {"image_size": 16, "batch_size": 8},
    }
    teacher = {**tiny(), "min_accuracy": 0.0, "cache": {"views": 0}, "fit": {"epochs": 10}}
    run = kd.train(merged(merged(made, quick), {"student": {**tiny(), "tuning": {}}, "teacher": teacher}))
    assert run.metrics["teacher_accuracy"] == 1.0
    assert run.metrics["accuracy"] >= 0.5
