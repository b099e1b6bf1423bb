"""`kd verify` calls no honest export of a real run a lie: pictures, labels and graphs
of several kinds.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from pieces import base, merged, teacher_at
from PIL import Image
from safetensors.torch import load_file

from kd import config
from kd.deploy.export import parity
from kd.deploy.export.export import ExportOptions, export
from kd.jobs.train import train


@pytest.fixture(autouse=True)
def brief(monkeypatch) -> None:
    """Time briefly."""
    monkeypatch.setattr(parity, "TIMED_SECONDS", 0.01)


@pytest.fixture(scope="session")
def pictures(photos, once) -> Path:
    """`photos`, of whose validation images three have formats or shapes that the
    endpoint refuses, and a stray file.
    """

    def build(root: Path) -> Path:
        shutil.copytree(photos, root / "photos")
        (root / "photos/val/notes.txt").write_text("Painted in a hurry.")
        for name, ending in (
            ("apple/00", "gif"),
            ("fig/00", "tif"),
            ("pear/00", "png"),
        ):
            file = root / "photos/val" / f"{name}.jpg"
            image = Image.open(file)
            image = (
                image if ending != "png" else image.resize((63, 3))
            )  # a side ratio of 21
            image.save(file.with_suffix(f".{ending}"))
            file.unlink()
        return root / "photos"

    return once("pictures", build)


def trained(pictures: Path, teacher: Path, folder: Path, **sections: object) -> Path:
    """Train a student of `teacher` for one epoch and return its run folder."""
    settings = merged(base(pictures, folder), {"run": {"epochs": 1}, **sections})
    return train(config.load(settings | {"teacher": teacher_at(teacher)})).folder


@pytest.fixture(scope="session")
def mixed(pictures, teacher, once) -> Path:
    """A finished run on these pictures, with its export. Do not write into it."""

    def build(folder: Path) -> Path:
        run = trained(pictures, teacher, folder)
        export(run, options=ExportOptions(calibrate=False))
        return run

    return once("mixed", build)


def verdicts(command, folder: Path, images: Path, run: Path) -> dict[str, str]:
    """Verify an export, which must have no wrong claim; return the verdict of
    each row.
    """
    answer = command("verify", folder, "--data", images, "--run", run, "--json")
    rows = json.loads(answer.out)["rows"]
    assert (answer.code, [row for row in rows if row["verdict"] == "WRONG"]) == (
        0,
        [],
    ), answer.err
    return {row["what"]: row["verdict"] for row in rows}


def test_pictures_that_only_training_reads_are_right(mixed, pictures, command):
    rows = verdicts(command, mixed / "export", pictures, mixed)
    right = (
        "parity/model.onnx/correct",
        "input/crop",
        "images.csv/times",
        "images.csv/choice",
    )
    assert [rows[place] for place in right] == ["right"] * len(right)


def test_nothing_but_json_is_printed(mixed, command):
    """The log has a line on the stray file."""
    answer = command("verify", mixed / "export", "--run", mixed, "--json")
    assert json.loads(answer.out)["verdict"].startswith("right: ")
    assert "1 file is not read" in answer.err


def test_an_export_of_a_run_without_labels_is_right(photos, teacher, command, tmp_path):
    run = trained(
        photos, teacher, tmp_path, data={"labels": "none"}, losses=[{"kind": "cosine"}]
    )
    folder = export(run, options=ExportOptions(int8=True)).folder
    assert json.loads((folder / "manifest.json").read_text())["about"]["labels"] == []
    rows = verdicts(command, folder, photos, run)
    right = ("parity/model.onnx/cosine", "images.csv/choice", "about/data/hash")
    assert [rows[place] for place in right] == ["right"] * len(right)


def test_the_parameters_of_an_encoder_are_those_of_its_weights(
    embedded, photos, command, tmp_path
):
    folder = export(embedded, tmp_path / "export", ExportOptions(index=True)).folder
    count = sum(
        tensor.numel() for tensor in load_file(folder / "model.safetensors").values()
    )
    assert (
        json.loads((folder / "manifest.json").read_text())["about"]["parameters"]
        == count
    )
    assert verdicts(command, folder, photos, embedded)["about/parameters"] == "right"
