"""An export notices that photographs change: a real endpoint's metrics and log, and the
summary of kd-predict.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from serving import Running, validation

from kd.deploy.predict.results import Journal
from kd.deploy.shift import ALARM, WINDOW
from kd.files.manifest import MANIFEST, checksum


def metrics(server: Running) -> dict[str, float]:
    """Parse Prometheus' text: each sample with its labels, and require a type for each
    name.
    """
    lines = server.get("/metrics").body.decode().splitlines()
    samples = [
        re.fullmatch(r"([a-z_]+)(\{.*\})? ([0-9.e+-]+|nan)", line)
        for line in lines
        if not line.startswith("#")
    ]
    assert all(samples), lines
    types = {line.split()[2] for line in lines if line.startswith("# TYPE ")}
    names = {
        re.sub("_(bucket|sum|count)$", "", sample[1]) for sample in samples if sample
    }
    assert names <= types
    return {
        sample[1] + (sample[2] or ""): float(sample[3]) for sample in samples if sample
    }


def send(server: Running, images: list[bytes], count: int) -> list[dict]:
    """Send so many images, the same ones again and again, ten in a request."""
    answers = []
    for first in range(0, count, 10):
        texts = [
            base64.b64encode(images[(first + i) % len(images)]).decode()
            for i in range(10)
        ]
        answers += server.post(
            json.dumps({"images": texts}).encode(), "application/json"
        ).json["predictions"]
    return answers


def dark(data: bytes) -> bytes:
    """Return a photograph of which hardly any light is left."""
    file = io.BytesIO()
    Image.open(io.BytesIO(data)).point([value // 16 for value in range(256)] * 3).save(
        file, "PNG"
    )
    return file.getvalue()


def changed(exported: Path, folder: Path, change: Callable[[dict], object]) -> Path:
    """Return a copy of an export with a change in the manifest, which has a
    checksum.
    """
    shutil.copytree(exported, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(
        json.dumps({**manifest, "checksum": checksum(manifest)})
    )
    return folder


@pytest.fixture(scope="module")
def large(exported, tmp_path_factory) -> Path:
    """The export with every count of its 13 validation images twenty times: 13 cannot
    prove a difference.
    """

    def change(manifest: dict) -> None:
        recorded = manifest["validation"]["model.onnx"]
        text = re.sub(
            r"(\d+):(\d+)",
            lambda pair: f"{pair[1]}:{20 * int(pair[2])}",
            json.dumps(recorded),
        )
        changes = {
            "images": 20 * 13,
            "confidence": 20 * recorded["confidence"],
            "calibrated": True,
        }
        changes |= {"right": 20 * recorded["right"]}
        manifest["validation"]["model.onnx"] = {**json.loads(text), **changes}

    return changed(exported, tmp_path_factory.mktemp("large") / "export", change)


def test_the_manifest_counts_the_validation_predictions(exported):
    manifest = json.loads((exported / MANIFEST).read_text())
    labels = json.loads((exported / "config.json").read_text())["label_names"]
    for file in ("model.onnx", "model.int8.onnx"):
        recorded = manifest["validation"][file]
        assert recorded["images"] == manifest["parity"][file]["images"] == 13
        for number in ("confidence", "brightness", "detail"):
            counts = recorded["numbers"][number]["counts"]
            assert set(counts) <= set(labels)
            assert (
                sum(
                    int(pair.split(":")[1])
                    for text in counts.values()
                    for pair in text.split()
                )
                == 13
            )


def test_a_stream_that_shifts_raises_an_alarm(large, photos):
    """The validation images again and again are like themselves; then the light goes
    out.
    """
    good = [data for data, _ in validation(photos)]
    with Running(large) as server:
        assert metrics(server)['kd_shift{of="appearance"}'] == 0
        answers = send(server, good, 2 * WINDOW)
        clean = metrics(server)
        answers += send(server, [dark(data) for data in good], 2 * WINDOW)
        shifted = metrics(server)
        assert server.stop() == 0
    scores = np.array([answer["score"] for answer in answers])
    assert (
        clean['kd_shift_alarms_total{of="appearance"}']
        == clean['kd_shift_alarms_total{of="labels"}']
        == 0
    )
    assert (
        max(clean['kd_shift{of="appearance"}'], clean['kd_shift{of="labels"}']) < ALARM
    )
    assert shifted['kd_shift{of="appearance"}'] > ALARM
    assert 1 <= shifted['kd_shift_alarms_total{of="appearance"}'] <= 2
    for label in {answer["label"] for answer in answers}:
        assert shifted[f'kd_labels_total{{label="{label}"}}'] == sum(
            answer["label"] == label for answer in answers
        )
    assert (
        shifted["kd_confidence_count"]
        == shifted['kd_confidence_bucket{le="+Inf"}']
        == len(scores)
    )
    assert shifted["kd_confidence_sum"] == pytest.approx(scores.sum(), abs=1e-3)
    for bound in (0.3, 0.5, 0.9):
        assert (
            shifted[f'kd_confidence_bucket{{le="{bound}"}}'] == (scores <= bound).sum()
        )
    logged = [
        line
        for line in server.errors.splitlines()
        if "not like those of validation" in line
    ]
    assert len(logged) == 1
    assert " WARNING kd.serve " in logged[0]
    assert "brightness at most 16 in 100%" in logged[0]
    right = np.mean(
        [
            answer["label"] == label
            for answer, (_, label) in zip(answers, validation(photos), strict=False)
        ]
    )
    moved = right + scores[-WINDOW:].mean() - scores[: len(good)].mean()
    assert shifted["kd_expected_accuracy"] == pytest.approx(
        min(1.0, max(0.0, moved)), abs=1e-4
    )


def test_prediction_says_that_photographs_are_others(large, photos, command, tmp_path):
    """What is compared stays in the journal: the result has no more columns than
    before.
    """
    folder = tmp_path / "dark"
    folder.mkdir()
    for number, (data, _) in enumerate(validation(photos) * 8):
        (folder / f"{number}.png").write_bytes(dark(data))
    answer = command("predict", large, photos / "val", "--to", tmp_path / "good.csv")
    assert (answer.code, len(answer.out.splitlines())) == (0, 2), answer
    scores = [
        float(row["score"])
        for row in csv.DictReader((tmp_path / "good.csv").read_text().splitlines())
    ]
    rows = [*csv.DictReader((tmp_path / "good.csv").read_text().splitlines())]
    right = np.mean(
        [row["label"] in Path(row["image"]).parts for row in rows]
    )  # issue 62: the mean confidence was said
    assert (
        f"expected accuracy {right:.1%}: {right:.1%} of 260 validation images were"
        " right" in answer.out
    )
    assert (
        f"mean confidence {np.mean(scores):.1%}, {np.mean(scores):.1%} on validation"
        in answer.out
    )
    answer = command("predict", large, folder, "--to", tmp_path / "all.jsonl")
    assert answer.code == 0, answer
    (line,) = [
        line
        for line in answer.out.splitlines()
        if "not like those of validation" in line
    ]
    assert re.search(
        r"brightness at most \d+ in 100% of 104 images, 0% in validation", line
    )
    rows = [
        json.loads(text) for text in (tmp_path / "all.jsonl").read_text().splitlines()
    ]
    assert {key for row in rows for key in row} == {"image", "label", "score", "top"}


def test_rows_of_an_earlier_start_are_counted_too(
    large, photos, command, tmp_path, monkeypatch
):
    first = command("predict", large, photos / "val", "--to", tmp_path / "first.csv")
    target = tmp_path / "second.csv"
    journal = tmp_path / "second.csv.part"
    with monkeypatch.context() as patch:
        patch.setattr(
            Journal, "finish", lambda *args: sys.exit(1)
        )  # killed before the last step
        assert command("predict", large, photos / "val", "--to", target).code == 1
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:6]))
    second = command("predict", large, photos / "val", "--to", target)
    assert "5 of them by an earlier start" in second.out
    assert first.out.splitlines()[1:] == second.out.splitlines()[1:] != []
