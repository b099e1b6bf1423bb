"""A new user's second hour: own list of images, own network, own loss, three seeds, export, serve, predict, stop.

Two of each split's images are HEIC where that extra is installed.
"""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import yaml
from pieces import tiny
from PIL import Image
from serving import Running

from kd.parts.datasets._decode import HEIF

NETWORK = """
from torch import nn


class Small(nn.Module):
    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 4, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(width, num_classes)

    def forward(self, image):
        return self.head(self.body(image))


def build(width: int = 8, num_classes: int = 3) -> nn.Module:
    return Small(width, num_classes)
"""


def own_loss() -> str:
    """Return the loss of CONTRIBUTING.md as it stands there."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    return text.partition("## Add a loss")[2].partition("```python\n")[2].partition("```")[0]


@pytest.fixture
def project(photos, inside, monkeypatch) -> Path:
    """A folder with images in no order that kd knows, lists of them, and a package with a network and a loss."""
    for split in ("train", "val"):
        lines = ["path,label"]
        for number, path in enumerate(sorted((photos / split).rglob("*.jpg"))):
            name = f"{split}_{number:02d}." + ("heic" if HEIF and number < 2 else "jpg")
            lines.append(f"{name},{path.parent.name}")
            if name.endswith("heic"):
                import pillow_heif  # an extra

                pillow_heif.from_pillow(Image.open(path)).save(name)
            else:
                shutil.copy(path, name)
        Path(f"{split}.csv").write_text("\n".join(lines) + "\n")
    Path("ourlab").mkdir()
    Path("ourlab/network.py").write_text(NETWORK)
    Path("ourlab/loss.py").write_text(own_loss())
    monkeypatch.syspath_prepend(str(inside))
    return inside


@pytest.mark.slow
def test_the_second_hour(project, command, refused):
    settings = {
        "run": {"epochs": 2, "every": {"log": 2}},
        "data": {"kind": "csv", "root": ".", "train_list": "train.csv", "val_list": "val.csv", "image_size": 16},
        "teacher": {**tiny(2, 48), "fit": {"epochs": 3, "lr": 3e-3}, "min_accuracy": 0.0},
        "student": {"kind": "torch", "model": "ourlab.network:build", "mean": [0.5] * 3, "std": [0.5] * 3},
        "losses": [{"kind": "ourlab.loss", "centred": False}],
        "backend": {"kind": "cpu", "precision": "fp32", "threads": 1},
    }
    settings["data"] |= {"batch_size": 8, "workers": 0}
    Path("food.yaml").write_text(yaml.safe_dump(settings))

    checked = command("train", "food.yaml", "--check")
    assert checked.code == 0, checked
    assert "36 training and 13 validation images, 3 classes" in checked.out

    runs = [f"runs/seed{seed}" for seed in range(3)]
    for seed in range(3):
        trained = command("train", "food.yaml", f"run.seed={seed}", f"run.name=seed{seed}")
        assert trained.code == 0, trained
    assert len(list(Path("runs/teachers").iterdir())) == 1
    report = command("report", *runs, "--trust")
    assert report.code == 0, report
    assert "Mean of 3 seeds (seed0, seed1, seed2), 95 % interval: accuracy" in report.out

    exported = command("export", runs[0], "--trust")
    assert exported.code == 0, exported
    with Running(project / runs[0] / "export") as server:
        reply = server.post((project / "val_12.jpg").read_bytes())
        answer = reply.json["predictions"][0]
        assert server.stop() == 0
    assert answer["label"] in ("apple", "fig", "pear")
    predicted = command("predict", f"{runs[0]}/export", ".", "--to", "answers.csv")
    assert predicted.code == 0, predicted
    with Path("answers.csv").open(newline="") as file:
        (row,) = (row for row in csv.DictReader(file) if "val_12.jpg" in str(row))
    assert answer["label"] in row.values()
    assert "losses[0].centered" in refused("train", "food.yaml", "losses=[{kind: ourlab.loss, centered: true}]")
