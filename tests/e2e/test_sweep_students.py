"""A sweep over students as a user starts it: its table, its picture, and both again after a kill."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import yaml
from test_own_network import CODE
from test_sweep import PATIENCE, killed_when

import kd
from kd.setup.recipe import BASELINE

STUDENTS = (
    "student={model: vit_tiny_patch16_224, args: {patch_size: 8, embed_dim: 24, depth: 1, num_heads: 2}},"
    "{kind: torch, model: mine:small, args: {width: 8}, mean: [0.5, 0.5, 0.5], std: [0.25, 0.25, 0.25]}"
)


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
def test_two_students_are_compared_and_after_a_kill_alike(settings, tmp_path, monkeypatch):
    settings["run"] |= {"epochs": 1, "baseline": True, "folder": "runs"}
    found = {}
    for name in ("calm", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "mine.py").write_text(CODE)
        (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
        if name == "killed":
            killed_when(folder, lambda sweep: (sweep / "journal.jsonl").is_file(), [STUDENTS])
            assert len((folder / "runs" / "tiny_sweep" / "journal.jsonl").read_text().splitlines()) == 1
            shutil.copy(found["calm"].folder / "frontier.json", folder / "runs" / "tiny_sweep")  # the same clock
        monkeypatch.chdir(folder)
        found[name] = kd.sweep("tiny.yaml", STUDENTS)
        monkeypatch.chdir(tmp_path)
        found[name] = replace(found[name], folder=folder / found[name].folder)
    calm, killed = found["calm"], found["killed"]
    assert killed.text == calm.text == (calm.folder / "sweep.md").read_text().rstrip()
    assert (killed.folder / "frontier.svg").read_text() == (calm.folder / "frontier.svg").read_text()
    costs = json.loads((calm.folder / "frontier.json").read_text())["costs"]
    text, drawn = calm.text, (calm.folder / "frontier.svg").read_text()
    for row in calm.rows:
        run = calm.folder / row["trial"]
        manifest = json.loads((run / "manifest.json").read_text())
        assert costs[row["trial"]] == {key: row[key] for key in ("ms", "mb", "parameters")}
        assert row["parameters"] == manifest["parameters"]["student"]
        assert row["ms"] > 0
        assert row["labels_only"] == json.loads((run / BASELINE / "scored.json").read_text())["row"]["accuracy"]
        line = next(line for line in text.splitlines() if f"{row['parameters']:,} " in line)
        assert f" {row['ms']:.3g} " in line
        assert ("frontier" in line) == row["frontier"]
    best = min(calm.rows, key=lambda row: row["ms"])
    assert best["frontier"]
    assert len(re.findall("<circle", drawn)) == 2 * len(calm.rows) + 1  # with labels only, and the teacher
    assert "teacher" in text
    assert costs["teacher"]["parameters"] == manifest["parameters"]["teacher"]
