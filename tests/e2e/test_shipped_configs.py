"""The configurations that need data of the user's, as they are shipped, on noise of
their size, for a few steps.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

ROOT = Path(__file__).parents[2]
STUDENTS = {
    "few_labels": 412_954,
    "wrong_labels": 412_954,
    "grocery": 3_406_876,
    "tiny_imagenet": 1_248_840,
}
"""Parameters of each student whose teacher comes from a file of ImageNet's weights."""

pytestmark = pytest.mark.slow


def noise(root: Path, splits: dict[str, int], classes: int, size: int) -> Path:
    """Write so many images of each class for each split."""
    generator = np.random.default_rng(0)
    for split, images in splits.items():
        for label in range(classes):
            folder = root / split / f"class_{label:03d}"
            folder.mkdir(parents=True)
            for i in range(images):
                Image.fromarray(
                    generator.integers(0, 256, (size, size, 3), np.uint8)
                ).save(folder / f"{i:04d}.jpg")
    return root


def test_the_configuration_of_cifar10_trains(command, tmp_path, monkeypatch):
    data = noise(tmp_path / "data", {"train": 33, "test": 3}, 10, 32)
    monkeypatch.chdir(ROOT)
    run = tmp_path / "runs"
    teachers = tmp_path / "teachers"
    keys = [
        f"data.root={data}",
        "run.steps=2",
        "teacher.fit.steps=2",
        "teacher.min_accuracy=0",
    ]
    places = [
        f"run.folder={run}",
        f"teacher.fit.folder={teachers}",
        "backend.threads=1",
    ]
    answer = command("train", "configs/cifar10.yaml", *keys, *places)
    assert answer.code == 0, answer
    manifest = json.loads((run / "cifar10" / "manifest.json").read_text())
    assert manifest["parameters"] == {"student": 927_010, "teacher": 2 * 2_570_290}
    scored = json.loads((run / "cifar10" / "scored.json").read_text())
    assert (scored["split"], scored["images"]) == ("test", 30)


@pytest.mark.parametrize("name", STUDENTS)
def test_a_teacher_comes_from_a_file_of_another_library(
    command, tmp_path, monkeypatch, name
):
    """The command of the header, with random weights under other names in the place of
    ImageNet's.
    """
    classes, size = {"grocery": (28, 128), "tiny_imagenet": (200, 64)}.get(
        name, (10, 32)
    )
    splits = {
        "grocery": {"train": 3, "val": 1, "test": 1},
        "tiny_imagenet": {"train": 2, "val": 1},
    }
    data = noise(
        tmp_path / "data", splits.get(name, {"train": 110, "test": 1}), classes, size
    )
    lite = "lite0" if classes == 10 else "lite2"
    torch.manual_seed(0)
    for model in {lite, "lite0"}:
        tensors = timm.create_model(f"tf_efficientnet_{model}").state_dict()
        torch.save(
            {f"other.{i}": tensor for i, tensor in enumerate(tensors.values())},
            tmp_path / f"{model}.pth",
        )
    monkeypatch.chdir(ROOT)
    run = tmp_path / "runs"
    keys = [
        f"data.root={data}",
        f"teacher.checkpoint={tmp_path / lite}.pth",
        "teacher.min_accuracy=0",
    ]
    keys += [
        f"run.folder={run}",
        f"teacher.fit.folder={tmp_path / 'teachers'}",
        "backend.threads=1",
    ]
    keys += [
        "run.steps=2",
        "run.every.evaluate=0",
        "teacher.fit.steps=2",
        "teacher.fit.evaluate=0",
    ]
    keys += (
        ["data.batch_size=64", "data.labels_per_class=4"]
        if name == "few_labels"
        else ["data.batch_size=32"]
    )
    keys += (
        [f"student.checkpoint={tmp_path / 'lite0.pth'}"] if name == "grocery" else []
    )
    answer = command("train", f"configs/{name}.yaml", *keys)
    assert answer.code == 0, answer
    manifest = json.loads((run / name / "manifest.json").read_text())
    assert manifest["parameters"]["student"] == STUDENTS[name]
    scored = json.loads((run / name / "scored.json").read_text())
    assert scored["images"] == classes
    assert "teacher_accuracy" in scored["row"]
