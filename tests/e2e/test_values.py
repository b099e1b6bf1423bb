"""Values of `kd-export --values` in every response: HTTP, the page, kd.load and
kd-predict, for one label per image and for several.
"""

from __future__ import annotations

import csv
import io
import json
import pickle
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import chromium
import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from serving import Running, images
from subjects import CLASSES, PIXELS, small_subject

import kd
from kd.config.schema import TaskSection
from kd.core.errors import RunError
from kd.deploy.export.export import write
from kd.deploy.export.flags import ExportOptions
from kd.deploy.export.graphs import Subject
from kd.deploy.predict.predict import PredictOptions, predict

HOSTILE = "<img src=x onerror=alert(1)>"
TABLE = f"""dish,kcal,protein_g,allergen
apple,52,0.3,
fig,74,0.8,=1+1
pear,57,-0.4,{HOSTILE}
kiwi,61,1.1,none
"""
VALUES = {
    "apple": {"kcal": 52, "protein_g": 0.3, "allergen": None},
    "fig": {"kcal": 74, "protein_g": 0.8, "allergen": "=1+1"},
    "pear": {"kcal": 57, "protein_g": -0.4, "allergen": HOSTILE},
}
CELLS = {
    "apple": ["52", "0.3", ""],
    "fig": ["74", "0.8", "'=1+1"],
    "pear": ["57", "-0.4", HOSTILE],
}


def subject_of_sets(folder: Path) -> Subject:
    """Return a student of label sets; most images have two or three labels."""
    subject = small_subject(folder)
    with subject.images() as read:
        batches = [
            (pixels, np.eye(len(CLASSES), dtype=np.int8)[labels])
            for pixels, labels in read(0)
        ]
    with torch.no_grad():
        subject.student.network.head.bias += 3
    return replace(
        subject,
        recipe=subject.recipe.with_(task=TaskSection(kind="label_sets")),
        images=lambda: nullcontext(lambda limit, training=False: batches),
    )


@pytest.fixture(scope="module", params=[small_subject, subject_of_sets])
def exports(request, tmp_path_factory) -> tuple[Path, Path]:
    """Return an export with values and the same without. Do not write into them."""
    folder = tmp_path_factory.mktemp("exports")
    table = folder / "nutrients.csv"
    table.write_text(TABLE)
    make = partial(write, request.param(folder / "runs"))
    with_values = make(folder / "valued", ExportOptions(values=table, defer_share=0.2))
    without = make(folder / "plain", ExportOptions(defer_share=0.2))
    return with_values.folder, without.folder


def subject_like(exports: tuple[Path, Path], folder: Path) -> Subject:
    """Return the student of the exports again."""
    sets = "thresholds" in (exports[1] / "manifest.json").read_text()
    return (subject_of_sets if sets else small_subject)(folder)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for number, pixels in enumerate(PIXELS[:12]):
        Image.fromarray(pixels.transpose(1, 2, 0)).save(folder / f"{number:02d}.png")
    return folder


def with_values(row: dict) -> dict:
    """Return a response's row of an export without values, with those of `VALUES`."""
    valued = {**row}
    for key in {"top", "labels"} & row.keys():
        valued[key] = [with_values(entry) for entry in row[key]]
    if "label" in row:
        valued["values"] = VALUES[row["label"]]
    return valued


def test_every_response_has_them_and_nothing_else_changes(exports, pictures):
    valued, plain = exports
    files = [path.read_bytes() for path in sorted(pictures.iterdir())]
    with Running(valued) as server, Running(plain) as other:
        pairs = [(server.post(file), other.post(file)) for file in files]
        batch = server.post(images(*files), "application/json").json["predictions"]
        table = server.post(files[0], path="/invocations?top=2", accept="text/csv")
        plain_table = other.post(files[0], path="/invocations?top=2", accept="text/csv")
    assert all(b"values" not in reply.body for _, reply in pairs)
    expected = [with_values(reply.json["predictions"][0]) for _, reply in pairs]
    assert [reply.json["predictions"][0] for reply, _ in pairs] == expected
    assert batch == expected
    assert b'"kcal": 52' in pairs[0][0].body
    model = kd.load(valued)
    for answer, row in zip(model(files), expected, strict=True):
        assert answer.values == row.get("values")
        assert [entry.values for entry in answer.top] == [
            VALUES[entry["label"]] for entry in row["top"]
        ]
        if "labels" in row:
            assert [entry.values for entry in answer.labels] == [
                VALUES[entry["label"]] for entry in row["labels"]
            ]
    answer = model(files[0])
    answer.top[0].values.clear()  # a caller's own copy
    assert model(files[0]).top[0].values == VALUES[answer.top[0].label]
    assert hash(answer) == hash(pickle.loads(pickle.dumps(model))(files[0]))
    (row,) = csv.reader(io.StringIO(table.body.decode()))
    (plain_row,) = csv.reader(io.StringIO(plain_table.body.decode()))
    cells = []
    for label, score in zip(plain_row[:-1:2], plain_row[1:-1:2], strict=True):
        cells += [label, score, *CELLS[label]]
    assert row == [*cells, plain_row[-1]]


def test_kd_predict_writes_them_in_every_format(exports, pictures, tmp_path):
    valued, plain = exports
    rows = {}
    for ending in ("csv", "jsonl", "parquet"):
        target = tmp_path / f"all.{ending}"
        predict(PredictOptions(export=valued, images=str(pictures), to=target, top=2))
        rows[ending] = target
    target = tmp_path / "plain.jsonl"
    predict(PredictOptions(export=plain, images=str(pictures), to=target, top=2))
    expected = [
        with_values(json.loads(line)) for line in target.read_text().split("\n")[:-1]
    ]
    lines = rows["jsonl"].read_text().split("\n")[:-1]
    assert [json.loads(line) for line in lines] == expected
    table = list(csv.DictReader(io.StringIO(rows["csv"].read_text())))
    for cells, row in zip(table, expected, strict=True):
        if "labels" in row:
            labels = [entry["label"] for entry in row["labels"]]
            columns = zip(*(CELLS[label] for label in labels), strict=True)
            joined = ["|".join(column).replace("'", "") for column in columns]
            shown = [cells[key] for key in ("kcal", "protein_g", "allergen")]
            assert [text.lstrip("'") for text in shown] == (joined or ["", "", ""])
            assert cells["labels"] == "|".join(labels)
        else:
            for suffix, entry in zip(("", "_2"), row["top"], strict=True):
                assert cells[f"label{suffix}"] == entry["label"]
                assert [
                    cells[f"{key}{suffix}"] for key in ("kcal", "protein_g", "allergen")
                ] == CELLS[entry["label"]]
    stored = pyarrow.parquet.read_table(rows["parquet"]).to_pylist()
    for record, row in zip(stored, expected, strict=True):
        assert [entry["values"] for entry in record["top"]] == [
            VALUES[entry["label"]] for entry in row["top"]
        ]
        if "label" in row:
            assert record["values"] == row["values"]


def test_a_result_begun_with_other_values_is_not_continued(
    exports, pictures, tmp_path, monkeypatch
):
    valued, _ = exports
    target = tmp_path / "all.jsonl"
    options = PredictOptions(export=valued, images=str(pictures), to=target)
    with monkeypatch.context() as patch:
        patch.setattr("kd.deploy.predict.results.Journal.finish", _killed)
        with pytest.raises(KeyboardInterrupt):
            predict(options)
    table = tmp_path / "other.csv"
    table.write_text(TABLE.replace("52", "53"))
    other = write(
        subject_like(exports, tmp_path / "runs"),
        tmp_path / "other",
        ExportOptions(values=table, defer_share=0.2),
    )
    with pytest.raises(RunError, match="begun with other values of: values"):
        predict(replace(options, export=other.folder))


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_pair_answers_with_the_values_of_the_first(exports, pictures, tmp_path):
    valued, _ = exports
    subject = subject_like(exports, tmp_path / "runs")
    with torch.no_grad():
        subject.student.network.head.weight *= 0.5
    digest = {**subject.provenance, "digest": "f" * 64}
    second = write(
        replace(subject, provenance=digest), tmp_path / "second", ExportOptions()
    ).folder
    pair = kd.load(valued, second=second)
    answers = pair(sorted(pictures.iterdir()))
    assert {answer.model for answer in answers} == {"first", "second"}
    for answer in answers:
        assert [entry.values for entry in answer.top] == [
            VALUES[entry.label] for entry in answer.top
        ]


def test_the_page_shows_them_as_text(exports, pictures, tmp_path):
    if chromium.path() is None:
        pytest.skip("no chromium here: apt-get install chromium")
    model = kd.load(exports[0])
    files = sorted(pictures.iterdir())
    with (
        Running(exports[0]) as server,
        chromium.Page(tmp_path / "profile") as page,
    ):
        page.open(f"http://127.0.0.1:{server.port}/")
        file = next(
            path
            for path in files
            if "pear" in [entry.label for entry in model(path).labels or [model(path)]]
        )
        page.choose("#file", file)
        page.until("document.getElementById('best')?.textContent")
        texts = page.run(
            "[...document.querySelectorAll('.values')].map(row => row.textContent)"
        )
        assert any(
            f"kcal: 57, protein g: -0.4, allergen: {HOSTILE}" in text for text in texts
        )
        assert page.run("document.querySelectorAll('#answer img').length") == 0
        assert page.problems == []
