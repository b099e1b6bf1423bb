"""`kd verify` beside a run folder: what the export alone does not show, and honest
exports of real runs.
"""

from __future__ import annotations

import json
import shutil

import pytest
from liars import Liar

from kd.deploy.export import parity
from kd.deploy.export.export import ExportOptions, export


@pytest.fixture(autouse=True)
def brief(monkeypatch) -> None:
    """Time briefly."""
    monkeypatch.setattr(parity, "TIMED_SECONDS", 0.01)


def test_real_exports_are_right(exported, distilled, embedded, photos, command):
    for folder, run in ((exported, distilled), (embedded / "export", embedded)):
        answer = command("verify", folder, "--data", photos, "--run", run, "--json")
        report = json.loads(answer.out)
        assert answer.code == 0, [
            row for row in report["rows"] if row["verdict"] == "WRONG"
        ]
        assert "; wrong: 0; not checked: " in report["verdict"]
        right = {row["what"] for row in report["rows"] if row["verdict"] == "right"}
        places = (
            "chain/teacher",
            "chain/student/weights",
            "images.csv/choice",
            "about/losses",
            "name",
            "about/data/hash",
        )
        assert not {*places, "kd.json/metrics", "scores/split"} - right
    answer = command("verify", exported)
    assert answer.code == 0
    assert "teacher  " in answer.out
    assert answer.out.splitlines()[-1].startswith("right: ")
    assert command("verify", exported, "--strict").code == 1


def test_an_export_of_the_teacher_is_right(distilled, photos, command, tmp_path):
    folder = export(
        distilled, tmp_path / "teacher", ExportOptions(calibrate=False), teacher=True
    ).folder
    answer = command("verify", folder, "--data", photos, "--run", distilled)
    assert answer.code == 0, answer


LIES = {  # what the run knows of the manifest
    "chain/teacher/weights": ("0" * 64, "chain/teacher"),
    "chain/teacher/members/teacher/name": ("vit_giant", "chain/teacher"),
    "chain/answers": ({"cache": "0" * 64, "count": 9}, "chain/answers"),
    "chain/student/weights": ("0" * 64, "chain/student/weights"),
    "chain/student/step": (9000, "chain/student/step"),
    "licences/data": ("mit", "licences/data"),
    "name": ("state of the art", "name"),
    "about/losses": (["ce"], "about/losses"),
    "about/data/hash": ("0" * 64, "about/data/hash"),
    "about/weights": ("started from nothing", "about/weights"),
    "scores/models/teacher/accuracy/value": (
        0.999,
        "scores/models/teacher/accuracy/value",
    ),
    "scores/pair/agreement": (0.999, "scores/pair"),
    "scores/evaluations": (1, "scores/evaluations"),
    "kd.json metrics/accuracy": (0.999, "kd.json/metrics"),
    "kd.json eval_crop": (0.5, "kd.json/eval_crop"),
}


def test_claims_that_the_run_contradicts_are_wrong(
    distilled, photos, command, tmp_path
):
    run = shutil.copytree(distilled, tmp_path / "run")
    text = (run / "config.yaml").read_text()
    assert "license: ''" in text
    (run / "config.yaml").write_text(
        text.replace("license: ''", "license: cc-by-nc-4.0")
    )
    honest = export(run, tmp_path / "honest", ExportOptions(calibrate=False)).folder
    assert command("verify", honest, "--data", photos, "--run", run).code == 0
    liar = Liar(shutil.copytree(honest, tmp_path / "lies"))
    for path, (value, _) in LIES.items():
        if path.startswith("kd.json "):
            liar.set(path.removeprefix("kd.json "), value, "kd.json")
        else:
            liar.set(path, value)
    liar.rows(
        lambda rows: [[a, b, truth, "apple"] for a, b, truth, *_ in rows]
    )  # all sorted into one folder
    liar.redraw()
    liar.reseal()
    answer = command("verify", liar.folder, "--run", run, "--json")
    assert answer.code == 1
    wrong = [
        row["what"]
        for row in json.loads(answer.out)["rows"]
        if row["verdict"] == "WRONG"
    ]
    assert not {row for _, row in LIES.values()} - {*wrong}
    assert "images.csv/choice" in wrong
    assert answer.err.startswith("verify: ")


def test_a_renamed_run_is_the_same_run(exported, distilled, photos, command, tmp_path):
    run = shutil.copytree(distilled, tmp_path / "renamed")
    answer = command("verify", exported, "--run", run, "--json")
    rows = {row["what"]: row["verdict"] for row in json.loads(answer.out)["rows"]}
    assert answer.code == 0, [
        name for name, verdict in rows.items() if verdict == "WRONG"
    ]
    assert (rows["chain/student/run"], rows["chain/student/step"]) == (
        "not checked",
        "right",
    )


def test_an_invented_score_is_wrong_beside_the_run_and_whole_in_json(
    exported, distilled, command, tmp_path
):
    liar = Liar(shutil.copytree(exported, tmp_path / "export"))
    liar.manifest["scores"]["models"]["student"]["f1"] = {"value": 0.99}
    liar.redraw()
    liar.reseal()
    rows = json.loads(command("verify", liar.folder, "--run", distilled, "--json").out)[
        "rows"
    ]
    assert {row["what"]: row["verdict"] for row in rows}[
        "scores/models/student/f1/value"
    ] == "WRONG"
    assert max(len(row["claimed"]) for row in rows) > 100


def test_what_is_no_export_or_no_run_is_refused(
    refused, command, exported, distilled, photos, tmp_path
):
    answer = command("verify", distilled, "--data", photos)
    assert answer.code == 3
    assert "is not an export: manifest.json is missing" in answer.err
    assert refused("verify", exported, "--data", photos, "--run", tmp_path).startswith(
        "run: "
    )
