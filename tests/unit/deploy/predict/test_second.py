"""`kd-predict --second`: a second model answers where the first is not sure, once each,
whatever kills it.
"""

import csv
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from pieces import wait_until
from safetensors.torch import load_file

from kd.deploy.export.export import ExportOptions, export
from kd.deploy.predict.predict import PredictOptions, predict
from kd.files.manifest import checksum

ROOT = Path(__file__).parents[4]
COUNTED = """
import sys
from kd.cli.serving import predict as main
from kd.deploy.serve.cascade import Cascade
from kd.deploy.serve.model import LoadedGraph

asked, predict_decoded = open(sys.argv.pop(1), "a", 1), LoadedGraph.predict_decoded


def counted(self, rgb, top, started):
    asked.write("first\\n" if isinstance(self, Cascade) else "second\\n")
    return predict_decoded(self, rgb, top, started)


LoadedGraph.predict_decoded = counted
sys.exit(main())
"""
"""The command, with a line in a file for each prediction of a model."""


@pytest.fixture(scope="module")
def small(distilled, tmp_path_factory) -> Path:
    """An export that is unsure of about half of the images."""
    return export(
        distilled,
        tmp_path_factory.mktemp("small") / "export",
        ExportOptions(defer_share=0.5),
    ).folder


@pytest.fixture(scope="module")
def large(distilled, tmp_path_factory) -> Path:
    """The export of the teacher."""
    return export(
        distilled, tmp_path_factory.mktemp("large") / "export", teacher=True
    ).folder


def predicted_rows(target: Path, *args: object, **options) -> dict[str, dict]:
    predict(
        PredictOptions(
            export=args[0], images=str(args[1]), to=target, top=2, cores=2, **options
        )
    )  # type: ignore[arg-type]
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert len({row["image"] for row in rows}) == len(rows)
    return {row.pop("image"): row for row in rows}


@pytest.fixture(scope="module")
def pictures(photos, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for path in (photos / "train").rglob("*.jpg"):
        shutil.copy(path, folder / f"{path.parent.name}_{path.name}")
    (folder / "cut.jpg").write_bytes((photos / "train/fig/00.jpg").read_bytes()[:200])
    return folder


def test_it_is_the_same_as_asking_both_and_choosing(small, large, pictures, tmp_path):
    first, second = (
        predicted_rows(tmp_path / f"{export.parent.name}.jsonl", export, pictures)
        for export in (small, large)
    )
    both = predicted_rows(tmp_path / "both.jsonl", small, pictures, second=large)
    chosen = {}
    for name, row in first.items():
        by_first = {**row, "model": "first"} if "error" not in row else row
        by_second = {**second[name], "sure": False, "model": "second"}
        chosen[name] = by_second if row.get("sure") is False else by_first
    assert both == chosen
    counts = [
        sum(row.get("model") == model for row in both.values())
        for model in ("first", "second")
    ]
    assert min(counts) >= 5, counts
    assert sum(counts) == len(both) - 1  # one is damaged

    predict(
        PredictOptions(
            export=small, images=str(pictures), to=tmp_path / "both.csv", second=large
        )
    )
    for row in csv.DictReader((tmp_path / "both.csv").read_text().splitlines()):
        prediction = both[row["image"]]
        assert row["model"] == prediction.get("model", "")
        assert row["label"] == prediction.get("label", "")
        assert row["sure"] == str(prediction.get("sure", "")).lower()
    predict(
        PredictOptions(
            export=small,
            images=str(pictures),
            to=tmp_path / "both.parquet",
            second=large,
        )
    )
    for row in pyarrow.parquet.read_table(tmp_path / "both.parquet").to_pylist():
        prediction = both[row["image"]]
        assert (row["model"], row["sure"]) == (
            prediction.get("model"),
            prediction.get("sure"),
        )


@pytest.mark.slow
def test_a_killed_and_resumed_job_predicts_each_image_once(
    small, large, pictures, tmp_path
):
    listed = tmp_path / "listed.txt"
    names = [str(path) for path in sorted(pictures.glob("*_*.jpg"))]
    listed.write_text("\n".join([*names, "missing.jpg"] * 60))
    uninterrupted = tmp_path / "whole.csv"
    predict(
        PredictOptions(
            export=small, images=str(listed), to=uninterrupted, second=large, cores=1
        )
    )
    target = tmp_path / "killed.csv"
    log = tmp_path / "asked"
    journal = tmp_path / "killed.csv.part"
    argv = [
        sys.executable,
        "-c",
        COUNTED,
        str(log),
        str(small),
        str(listed),
        "--to",
        str(target),
        "--threads",
        "1",
    ]
    argv += ["--second", str(large)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_until(lambda: journal.is_file() and journal.stat().st_size > 20_000, process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not target.exists()
    journaled = [
        json.loads(line)
        for line in journal.read_text().splitlines(keepends=True)[1:]
        if line.endswith("\n")
    ]
    assert 0 < len(journaled) < len(names) * 60
    log.unlink()
    resumed = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    assert target.read_bytes() == uninterrupted.read_bytes()
    assert f"{len(journaled)} of them by an earlier start" in resumed.stdout
    by_model = Counter(log.read_text().splitlines())
    rows = list(csv.DictReader(target.read_text().splitlines()))
    assert by_model["first"] == sum(not row["error"] for row in rows[len(journaled) :])
    passed = [id for id, row in enumerate(rows) if row["model"] == "second"]
    assert by_model["second"] == sum(id >= len(journaled) for id in passed)
    assert f"{len(passed)} of them by the second model" in resumed.stdout


def test_the_teacher_is_written_in_the_same_form(
    distilled, large, teacher, command, tmp_path
):
    manifest = json.loads((large / "manifest.json").read_text())
    card = (large / "README.md").read_text()
    assert manifest["parity"]["model.onnx"]["same_top1"] == 13
    assert manifest["name"] == "tiny-teacher"
    assert "a teacher. Version" in " ".join(card.split())
    assert f"the teacher of the run {distilled.name}" in card
    metrics = json.loads((large / "kd.json").read_text())["metrics"]
    best = max(
        (
            json.loads(line)
            for line in (distilled / "metrics.jsonl").read_text().splitlines()
        ),
        key=lambda row: row.get("accuracy", -1),
    )
    assert metrics["accuracy"] == best["teacher_accuracy"]
    fitted, written = (
        load_file(folder / "model.safetensors") for folder in (teacher, large)
    )
    head = [name for name in fitted if "head" in name]
    assert all(
        np.array_equal(fitted[name], written[name])
        for name in fitted.keys() - set(head)
    )
    answer = command(
        "export", distilled, "--teacher", "--to", tmp_path / "again", "--no-onnx"
    )
    assert answer.code == 0, answer


def renamed(folder: Path, target: Path) -> Path:
    """Copy an export, with another name for one class."""
    shutil.copytree(folder, target)
    content = (target / "config.json").read_text().replace('"fig"', '"figs"')
    (target / "config.json").write_text(content)
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["files"]["config.json"]["sha256"] = hashlib.sha256(
        content.encode()
    ).hexdigest()
    del manifest["validation"]  # the counts of its labels
    (target / "manifest.json").write_text(
        json.dumps({**manifest, "checksum": checksum(manifest)})
    )
    return target


def test_incompatible_exports_are_one_line_errors(
    small, large, teacher, exported, pictures, refused, settings, tmp_path
):
    to = ("--to", tmp_path / "all.csv")
    assert "does not say which of its predictions are sure" in refused(
        "predict", exported, pictures, *to, "--second", large
    )
    assert "kd-export RUN --teacher" in refused(
        "predict", small, pictures, *to, "--second", teacher
    )
    relabelled = renamed(large, tmp_path / "other")
    assert "that of the first model is 'fig'" in refused(
        "predict", small, pictures, *to, "--second", relabelled
    )
    assert not to[1].exists()


def test_a_teacher_without_an_export_is_a_one_line_error(
    distilled, embedded, exported, refused, tmp_path
):
    to = ("--to", tmp_path / "export")
    assert "no confidence holds 0.02" in refused(
        "export", distilled, *to, "--defer", "0.02"
    )
    assert "returns vectors" in refused("export", embedded, *to, "--defer-share", "0.1")
    graph = (
        "teacher.kind=onnx",
        f"teacher.model={exported / 'model.onnx'}",
        "teacher.attention=auto",
    )
    assert "is no network of torch" in refused(
        "export", distilled, *to, "--teacher", *graph
    )
    averaged = f"teacher.also=[{{model: {exported}}}]"
    assert "averages 2 teachers" in refused(
        "export", distilled, *to, "--teacher", averaged
    )
    alone = ("losses=[{kind: ce}]", "teacher.model=")
    assert "has no teacher" in refused("export", distilled, *to, "--teacher", *alone)
    assert not to[1].exists()


def test_the_first_models_predictions_are_compared_with_validation(
    small, large, pictures, tmp_path, monkeypatch
):
    """Issue 49: before, nobody looked where a second model answered."""
    monkeypatch.setattr("kd.deploy.shift.ALARM", 0.0)  # every difference has its line
    notes = []
    for name, second in (("alone", None), ("both", large)):
        target = tmp_path / f"{name}.jsonl"
        notes.append(
            predict(
                PredictOptions(
                    export=small, images=str(pictures), to=target, second=second
                )
            ).notes
        )
    assert notes[0] == notes[1] != ()
    row = json.loads((tmp_path / "both.jsonl").read_text().splitlines()[0])
    assert not {"measures", "asked", "stamp"} & row.keys()
