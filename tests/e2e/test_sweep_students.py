"""A sweep over students as a user starts it: its table, its picture, and both again
after a kill.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from test_own_network import CODE
from test_sweep import PATIENCE, ended, killed_when

import kd
from kd.setup.recipe import BASELINE

STUDENTS = (
    "student={model: vit_tiny_patch16_224, args: {patch_size: 8, embed_dim: 24, depth:"
    " 1, num_heads: 2}},{kind: torch, model: mine:small, args: {width: 8}, mean: [0.5,"
    " 0.5, 0.5], std: [0.25, 0.25, 0.25]}"
)


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
def test_two_students_are_compared_and_after_a_kill_alike(
    settings, tmp_path, monkeypatch
):
    settings["run"] |= {"epochs": 1, "baseline": True, "folder": "runs"}
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)
    Path("tiny.yaml").write_text(yaml.safe_dump(settings))
    killed_when(tmp_path, ended, [STUDENTS])
    folder = Path("runs", "tiny_sweep")
    (finished,) = (trial.user_attrs for trial in ended(folder))
    result = kd.sweep("tiny.yaml", STUDENTS)
    assert result.text == (folder / "sweep.md").read_text().rstrip()
    assert (
        next(row for row in result.rows if row["trial"] == finished["trial"]).items()
        >= finished.items()
    )
    costs = result.study.user_attrs["costs"]["costs"]
    for row in result.rows:
        run = folder / row["trial"]
        manifest = json.loads((run / "manifest.json").read_text())
        assert costs[row["trial"]] == {
            key: row[key] for key in ("ms", "mb", "parameters")
        }
        assert row["parameters"] == manifest["parameters"]["student"]
        assert (
            row["labels_only"]
            == json.loads((run / BASELINE / "scored.json").read_text())["row"][
                "accuracy"
            ]
        )
        line = next(
            line
            for line in result.text.splitlines()
            if f"{row['parameters']:,} " in line
        )
        assert f" {row['ms']:.3g} " in line
        assert ("frontier" in line) == row["frontier"]
    assert min(result.rows, key=lambda row: row["ms"])["frontier"]
    drawn = (folder / "frontier.svg").read_text()
    symbols = re.search(r'class="mark-symbol role-mark[^>]*>(.*?)</g>', drawn)
    assert symbols
    assert (
        symbols[1].count("<path") == 2 * len(result.rows) + 1
    )  # with labels only, and the teacher
    assert costs["teacher"]["parameters"] == manifest["parameters"]["teacher"]
    assert kd.sweep("tiny.yaml", STUDENTS).text == result.text
    assert (folder / "frontier.svg").read_text() == drawn
