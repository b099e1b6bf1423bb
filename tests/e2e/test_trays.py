"""Several labels an image from a CSV file to an endpoint: fitted, distilled, resumed,
exported, served.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pyarrow.parquet
import pytest
import torch
from pieces import CLASSES, merged, tiny
from PIL import Image
from safetensors.torch import load_file
from serving import Running

import kd
from kd import config
from kd.core.errors import KdError, ModelError
from kd.deploy.export.export import ExportOptions, export
from kd.deploy.verify.comparison import WRONG
from kd.deploy.verify.verify import VerifyOptions, verify
from kd.jobs.train import train


def paint(root: Path) -> None:
    """Write noisy pictures, brighter in the channel of each class that they show, and
    what they show as CSV.
    """
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("val", 40)):
        lines = ["file,labels"]
        for number in range(count):
            shows = rng.random(3) < 0.5
            pixels = rng.integers(0, 120, (20, 20, 3), np.uint8) + 100 * shows.astype(
                np.uint8
            )
            name = f"{split}_{number}.jpg"
            Image.fromarray(pixels).save(root / name, quality=90)
            lines.append(
                f"{name},{'|'.join(name for name, present in zip(CLASSES, shows, strict=True) if present)}"
            )
        (root / f"{split}.csv").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def configuration(tmp_path_factory) -> dict:
    """A configuration: a teacher to fit, a cache, mixup, a sifter, the labels-only
    baseline.
    """
    root = tmp_path_factory.mktemp("trays")
    paint(root)
    files = {
        "train_labels": "train.csv",
        "val_labels": "val.csv",
        "augment": {"mixup": 0.2},
    }
    fit = {"epochs": 12, "lr": 5e-3, "folder": str(root / "teachers")}
    return {
        "run": {
            "name": "tiny",
            "folder": str(root / "runs"),
            "epochs": 6,
            "baseline": True,
            "keep": 5,
        },
        "data": {
            "kind": "multilabel",
            "root": str(root),
            **files,
            "image_size": 16,
            "batch_size": 8,
            "workers": 0,
        },
        "teacher": {
            **tiny(2, 48),
            "precision": "fp32",
            "cache": {"views": 2},
            "fit": fit,
        },
        "student": tiny(),
        "losses": [{"kind": "binary_kl"}, {"kind": "bce", "weight": 0.5}],
        "sifter": {"kind": "history", "keep": 0.7, "warmup": 2},
        "optimizer": {"lr": 5e-3},
        "backend": {"kind": "cpu", "precision": "fp32", "threads": 1},
    }


@pytest.fixture(scope="module")
def trays(configuration) -> Path:
    """The finished run with its export. Do not write into it."""
    folder = train(config.load(configuration)).folder
    export(folder, options=ExportOptions(int8=True))
    return folder


def val_rows(folder: Path) -> list[dict]:
    rows = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    return [row for row in rows if row["kind"] == "val"]


def test_the_run_says_map_and_f1_wherever_it_says_how_good_it_is(trays, command):
    best = max(val_rows(trays), key=lambda row: row["map"])
    assert json.loads((trays / "manifest.json").read_text())["decides"] == "map"
    assert best["map"] > 0.8, best  # guessing has 0.5
    assert best["teacher_map"] > 0.9, best
    report = " ".join((trays / "report.md").read_text().split())
    pattern = (
        rf"{100 * best['map']:.1f} % \([\d.]+ to [\d.]+\) \|"
        rf" {100 * best['f1_macro']:.1f} % \("
    )
    assert "| mAP | F1 (macro) | F1 (micro) |" in report
    assert re.search(pattern, report)
    assert "student, labels only" in report
    assert "(labels in common, of those that either gives)" in report
    page = command("report", trays)
    assert page.code == 0, page
    assert "validation mAP" in (trays / "report.html").read_text()
    evaluated = command("evaluate", trays)
    assert (evaluated.code, "map" in evaluated.out) == (0, True), evaluated


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits_with_cache_sifter_and_mixup(
    trays, configuration
):
    again = merged(configuration, {"run": {"name": "again", "baseline": False}})
    uninterrupted = kd.train(again).folder
    expected = load_file(
        max((uninterrupted / "checkpoints").iterdir()) / "tensors.safetensors"
    )
    for folder in sorted((uninterrupted / "checkpoints").iterdir())[1:]:
        shutil.rmtree(folder)
    resumed = load_file(
        max((kd.train(again).folder / "checkpoints").iterdir()) / "tensors.safetensors"
    )
    exact = {
        "rtol": 0,
        "atol": 0,
        "equal_nan": True,
    }  # a sifter has no loss yet for some images
    torch.testing.assert_close(resumed, expected, **exact)


def test_the_manifest_has_a_threshold_for_each_class(trays):
    manifest = json.loads((trays / "export/manifest.json").read_text())
    thresholds = manifest["output"]["thresholds"]
    assert tuple(thresholds) == CLASSES
    assert all(
        0 < entry["threshold"] < 1 and entry["chosen"] and entry["images"] >= 10
        for entry in thresholds.values()
    )
    assert (
        json.loads((trays / "export/config.json").read_text())["problem_type"]
        == "multi_label_classification"
    )
    assert 0.8 < manifest["parity"]["model.onnx"]["mAP"] <= 1
    card = (trays / "export/README.md").read_text()
    assert "3 of 3 thresholds have the largest F1" in card
    assert "| model | mAP | F1 (macro) | F1 (micro) |" in " ".join(card.split())


def test_endpoint_and_kd_predict_return_labels_above_thresholds(
    trays, configuration, command, tmp_path
):
    folder = trays / "export"
    root = Path(configuration["data"]["root"])
    photos = sorted(root.glob("val_*.jpg"))[:12]
    limits = [
        entry["threshold"]
        for entry in json.loads((folder / "manifest.json").read_text())["output"][
            "thresholds"
        ].values()
    ]
    session = onnxruntime.InferenceSession(
        folder / "model.onnx", providers=["CPUExecutionProvider"]
    )
    crops = [
        np.asarray(Image.open(photo).resize((16, 16), Image.Resampling.BICUBIC))
        for photo in photos
    ]
    target = tmp_path / "labels.jsonl"
    (tmp_path / "some").mkdir()
    for photo in photos:
        shutil.copy(photo, tmp_path / "some")
    for file in (target, target.with_suffix(".csv")):
        assert command("predict", folder, tmp_path / "some", "--to", file).code == 0
    predicted = [json.loads(line) for line in target.read_text().splitlines()]
    rows = list(csv.DictReader(io.StringIO(target.with_suffix(".csv").read_text())))
    assert list(rows[0]) == ["image", "labels", "scores", "error"]
    assert (
        command(
            "predict",
            folder,
            tmp_path / "some",
            "--to",
            tmp_path / "all.csv",
            "--top",
            "0",
        ).code
        == 0
    )
    scored = list(csv.DictReader(io.StringIO((tmp_path / "all.csv").read_text())))
    assert list(scored[0]) == [*rows[0], *(f"score:{name}" for name in CLASSES)]
    with Running(folder) as server:
        for photo, crop, row, line, scored_row in zip(
            photos, crops, predicted, rows, scored, strict=True
        ):
            (prediction,) = server.post(photo.read_bytes()).json["predictions"]
            returned = {pair["label"]: pair["score"] for pair in prediction["labels"]}
            assert line["labels"] == "|".join(returned)
            assert row["labels"] == prediction["labels"]
            scores = {pair["label"]: pair["score"] for pair in prediction["top"]}
            assert scores == {
                name: float(scored_row.pop(f"score:{name}")) for name in CLASSES
            }
            assert scored_row == line
            above = [
                name
                for name, limit in zip(CLASSES, limits, strict=True)
                if scores[name] > limit
            ]
            assert sorted(returned) == sorted(above)
            (logits,) = session.run(None, {"image": crop.transpose(2, 0, 1)[None]})[
                0
            ].astype(np.float64)
            assert scores == pytest.approx(
                dict(zip(CLASSES, 1 / (1 + np.exp(-logits)), strict=True)), abs=1e-5
            )
        assert server.get("/").status == 200
        assert server.stop() == 0


def test_each_label_says_whether_it_is_sure(trays, configuration, command, tmp_path):
    folder = tmp_path / "export"
    photos = tmp_path / "some"
    answer = command("export", trays, "--to", folder, "--defer-share", "0.4")
    assert answer.code == 0, answer
    bands = json.loads((folder / "manifest.json").read_text())["output"]["defer"][
        "labels"
    ]
    assert "most of its sure but wrong predictions are about" in answer.out
    assert "- model.onnx: passes" in (folder / "README.md").read_text()
    photos.mkdir()
    for photo in sorted(Path(configuration["data"]["root"]).glob("val_*.jpg")):
        shutil.copy(photo, photos)
    for file in ("all.jsonl", "all.csv", "all.parquet"):
        assert (
            command(
                "predict", folder, photos, "--to", tmp_path / file, "--top", "0"
            ).code
            == 0
        )
    rows = [
        json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()
    ]
    lines = list(csv.DictReader(io.StringIO((tmp_path / "all.csv").read_text())))
    stored = pyarrow.parquet.read_table(tmp_path / "all.parquet").to_pylist()
    flags = set()
    with Running(folder) as server:
        for photo, row, line, stored_row in zip(
            sorted(photos.iterdir()), rows, lines, stored, strict=True
        ):
            (prediction,) = server.post(photo.read_bytes()).json["predictions"]
            for entry in prediction["top"]:
                low = bands[entry["label"]]["low"]
                high = bands[entry["label"]]["high"]
                at_edge = (
                    min(abs(entry["score"] - low), abs(entry["score"] - high)) < 1e-5
                )  # it is rounded to 6 digits
                assert at_edge or entry["sure"] == (not low < entry["score"] < high), (
                    entry
                )
            assert prediction["sure"] == all(
                entry["sure"] for entry in prediction["top"]
            )
            assert (
                {key: row[key] for key in prediction}
                == prediction
                == {key: stored_row[key] for key in prediction}
            )
            assert line["sure"] == str(prediction["sure"]).lower()
            flags.add(prediction["sure"])
        table = server.post(photo.read_bytes(), accept="text/csv")
        assert table.body.decode().strip().rpartition(",")[2] == line["sure"]
        assert server.stop() == 0
    assert flags == {True, False}


@pytest.mark.slow
def test_labels_may_be_withheld_or_some_may_lack(trays, configuration, tmp_path):
    root = Path(configuration["data"]["root"])
    content = dict(
        line.split(",") for line in (root / "train.csv").read_text().splitlines()[1:]
    )
    labels = {name: text.split("|") if text else [] for name, text in content.items()}
    (tmp_path / "some.json").write_text(
        json.dumps(labels | dict.fromkeys(list(labels)[:10]))
    )
    teacher = {"model": str(trays / "export"), "args": {}, "fit": {"epochs": 0}}
    short = {
        "run": {"folder": str(tmp_path), "epochs": 2, "baseline": False},
        "teacher": teacher,
    }
    withheld = merged(
        merged(configuration, short),
        {"run": {"name": "none"}, "data": {"labels": "none"}},
    )
    run = train(config.load({**withheld, "losses": [{"kind": "binary_kl"}]}))
    assert {"kl", "agreement"} <= run.metrics.keys()
    assert "map" not in run.metrics
    export(run.folder, options=ExportOptions())
    manifest = json.loads((run.folder / "export/manifest.json").read_text())
    assert [
        entry["threshold"] for entry in manifest["output"]["thresholds"].values()
    ] == [0.5] * 3
    assert (
        "mAP" not in manifest["parity"]["model.onnx"]
    )  # PyTorch's own answers are no labels
    verdict = verify(
        VerifyOptions(export=run.folder / "export", data=str(root), run=run.folder)
    )
    assert [row.what for row in verdict.rows if row.verdict == WRONG] == []
    partly = {"labels": "some", "train_labels": str(tmp_path / "some.json")}
    assert (
        train(
            config.load(
                merged(
                    merged(configuration, short),
                    {"run": {"name": "some"}, "data": partly},
                )
            )
        ).metrics["map"]
        > 0.5
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            ["losses=[{kind: kl}]"],
            (
                r"losses\[0\].kind: 'kl' reads logits by a softmax, but images have"
                r" several labels"
            ),
        ),
        (
            ["losses=[{kind: cosine}]", "run.baseline=false"],
            "data.labels: .*the task embedding is",
        ),
        (["data.balance=0.5"], "data.balance: "),
        (["teacher.cache.topk=2"], "teacher.cache.topk: "),
    ],
)
def test_options_for_one_label_are_refused_with_several(configuration, changes, words):
    with pytest.raises(KdError, match=f"^{words}"):
        config.load(configuration, changes)


def test_a_teacher_of_one_label_does_not_teach_several_and_the_other_way_round(
    configuration, settings, teacher, trays
):
    single = merged(
        configuration,
        {
            "run": {"name": "wrong"},
            "teacher": {"model": str(teacher), "args": {}, "fit": {"epochs": 0}},
        },
    )
    with pytest.raises(ModelError, match="trained for one label per image"):
        train(config.load(single))
    for kind, model in (
        ("timm", trays / "export"),
        ("onnx", trays / "export/model.onnx"),
    ):
        several = {**settings, "teacher": {"kind": kind, "model": str(model)}}
        with pytest.raises(ModelError, match="trained for several labels per image"):
            train(config.load(several))
