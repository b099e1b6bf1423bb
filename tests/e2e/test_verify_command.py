"""`kd verify` beside a run folder: the chain from the teacher on, and honest exports of real runs."""

from __future__ import annotations

import json
import shutil

import pytest

from kd.deploy.export import parity
from kd.deploy.export.export import ExportOptions, export
from kd.deploy.export.package import seal


@pytest.fixture(autouse=True)
def brief(monkeypatch) -> None:
    """Time briefly."""
    monkeypatch.setattr(parity, "TIMED_SECONDS", 0.01)


def test_real_exports_are_right(exported, distilled, embedded, photos, command):
    for folder, run in ((exported, distilled), (embedded / "export", embedded)):
        answer = command("verify", folder, "--data", photos, "--run", run)
        assert answer.code == 0, answer
        assert "WRONG" not in answer.out
        assert "teacher  " in answer.out
        for what in ("chain: the teacher's weights", "chain: weights of the step, as exported", "licence: data"):
            assert any(line.startswith(f"| {what} ") for line in answer.out.splitlines()), what


LIES = {  # what the export alone does not know: of the manifest, and the row
    "teacher": (("chain", "teacher", "weights"), "0" * 64, "chain: the teacher's weights"),
    "answers": (("chain", "answers"), {"cache": "0" * 64, "count": 9}, "chain: the teacher's answers: count"),
    "weights of the step": (("chain", "student", "weights"), "0" * 64, "chain: weights of the step"),
    "licence": (("licences", "teacher"), "mit", "licence: teacher"),
}


def test_lies_that_the_run_tells(distilled, photos, command, tmp_path):
    run = shutil.copytree(distilled, tmp_path / "run")
    text = (run / "config.yaml").read_text()
    assert "license: ''" in text
    (run / "config.yaml").write_text(text.replace("license: ''", "license: cc-by-nc-4.0"))
    honest = export(run, tmp_path / "honest", ExportOptions(calibrate=False)).folder
    assert command("verify", honest, "--data", photos, "--run", run).code == 0
    for name, (keys, value, row) in LIES.items():
        folder = shutil.copytree(honest, tmp_path / name)
        facts = json.loads((folder / "manifest.json").read_text())
        inner = facts
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        seal(folder, {key: one for key, one in facts.items() if key not in ("files", "checksum")})
        answer = command("verify", folder, "--data", photos, "--run", run, "--json")
        assert answer.code == 3
        wrong = [one["what"] for one in json.loads(answer.out)["rows"] if one["verdict"] == "WRONG"]
        assert row in wrong, (name, wrong)
        assert answer.err.startswith("verify: ")


def test_bad_input(refused, exported, distilled, photos, tmp_path):
    assert "is not an export: it has no manifest.json of one" in refused("verify", distilled, "--data", photos)
    assert refused("verify", exported, "--data", photos, "--run", tmp_path).startswith("run: ")
