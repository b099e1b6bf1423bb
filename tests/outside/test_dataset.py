"""A data source is one file beside kd's: `kd init` finds it by its `recognizes`, and a
run learns from it.
"""

import io
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import yaml
from pieces import merged, tiny
from PIL import Image

import kd
import kd.parts.datasets
from kd.core.errors import DataError
from kd.parts import registry
from kd.parts.datasets import (
    Categorical,
    LabelColumn,
    Names,
    SplitRequest,
    Storage,
    source,
)


@pytest.fixture
def arrays(monkeypatch):
    monkeypatch.setattr(
        kd.parts.datasets,
        "__path__",
        [*kd.parts.datasets.__path__, str(Path(__file__).parent / "datasets")],
    )


def test_kd_init_finds_it_and_a_run_learns_from_it(
    arrays, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert "arrays" in registry.names("datasets")
    rng = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for split, count in (("train", 24), ("val", 8)):
        labels = np.array(["dark", "light"])[np.arange(count) % 2]
        pixels = (
            rng.integers(0, 60, (count, 20, 20, 3))
            + 180 * (labels == "light")[:, None, None, None]
        )
        np.savez(folder / f"{split}.npz", pixels=pixels.astype(np.uint8), labels=labels)
    answer = command("init", folder, "-o", tmp_path / "first.yaml")
    assert answer.code == 0, answer
    written = yaml.safe_load((tmp_path / "first.yaml").read_text())
    assert {key: written["data"][key] for key in ("kind", "folder")} == {
        "kind": "arrays",
        "folder": str(folder),
    }
    assert "2 classes of 12 to 12 images" in (tmp_path / "first.yaml").read_text()
    quick = {
        "run": {"epochs": 2, "name": "quick", "folder": str(tmp_path)},
        "data": {"image_size": 16, "batch_size": 8},
    }
    teacher = {
        **tiny(),
        "min_accuracy": 0.0,
        "cache": {"views": 0},
        "fit": {"epochs": 10},
    }
    run = kd.train(
        merged(
            merged(written, quick),
            {"student": {**tiny(), "tuning": {}}, "teacher": teacher},
        )
    )
    assert run.metrics["teacher_accuracy"] == 1.0
    assert run.metrics["accuracy"] >= 0.5


def test_a_storage_is_one_class_and_one_call(arrays, tmp_path):
    """Held-out images, groups, unlabelled images and wrong classes are as for kd's."""
    rng = np.random.default_rng(0)
    file = tmp_path / "lab.sqlite"
    with sqlite3.connect(file) as database:
        database.execute(
            "CREATE TABLE pictures (path TEXT PRIMARY KEY, dish TEXT, jpeg BLOB)"
        )
        for number in range(40):
            dish = None if number % 4 == 3 else ("soup", "toast")[number % 2]
            shade = 40 if number % 2 else 200
            pixels = rng.integers(0, 40, (16, 16, 3)) + shade
            jpeg = io.BytesIO()
            Image.fromarray(pixels.astype(np.uint8)).save(jpeg, "JPEG")
            row = f"plate{number // 4:02d}/{number:02d}.jpg", dish, jpeg.getvalue()
            database.execute("INSERT INTO pictures VALUES (?, ?, ?)", row)
    values = {
        "run": {"epochs": 6, "name": "lab", "folder": str(tmp_path)},
        "data": {
            "kind": "sqlite",
            "file": str(file),
            "group": "(.*)/",
            "image_size": 16,
            "batch_size": 8,
        },
        "teacher": {**tiny(), "min_accuracy": -1.0, "fit": {"epochs": 4}},
        "student": tiny(),
        "losses": [{"kind": "kl"}],
    }
    with pytest.raises(
        DataError,
        match=r"^data\.file: image 'plate00/03\.jpg' has no label.*labels=some",
    ):
        kd.train(values)
    run = kd.train(values, "data.labels=some", "data.val_fraction=0.3")
    assert run.metrics["agreement"] >= 0.5
    options = registry.default_options(
        "datasets", "sqlite", file=str(file), group="(.*)/"
    )
    build = registry.find("datasets", "sqlite", "data.kind").build
    train = build(options, "train", None, "some")
    val = build(options, "val", ["soup", "toast"], "some")
    assert len(train) + len(val) == 40
    assert not {train.group(id) for id in range(len(train))} & {
        val.group(id) for id in range(len(val))
    }
    with pytest.raises(DataError, match=r"the class 'toast', which is not among"):
        build(options, "val", ["soup", "stew"], "some")


def test_labels_of_a_storage_of_ones_own(tmp_path):
    storage = Storage(
        Names([b"a", b"b", b"c", b"d"]), np.ones(4), np.zeros(4, np.uint64)
    )
    request = SplitRequest("train", None, "some", "data.file")
    some = source(
        storage, LabelColumn(Categorical.from_values(["x", None, "y", ""])), request
    )
    assert [some.label(id) for id in range(4)] == [0, -1, 1, -1]
    sets = [frozenset(["\xe9"]), frozenset(["e\u0301", "z"]), None, frozenset()]
    several = source(
        storage, LabelColumn(Categorical.from_values(sets), sets=True), request
    )
    assert several.classes == ("z", "\xe9")
    assert [several.label(id).tolist() for id in range(4)] == [
        [0, 1],
        [1, 1],
        [-1, -1],
        [0, 0],
    ]
    with pytest.raises(TypeError, match="sets are int8"):
        source(storage, LabelColumn(np.array([1, 0, 1, 0]), ["a", "b"]), request)
