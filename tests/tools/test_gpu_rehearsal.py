"""`make gpu TINY=1`: every part of benchmarks/gpu.py on the CPU, so that no minute of a
GPU is spent on a typo.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip(
    "torch", minversion="2.9", reason="make gpu needs torch 2.9"
)
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu  # noqa: E402


@pytest.mark.slow
def test_every_part_runs_and_a_finished_one_is_kept(tmp_path, capfd):
    finished = gpu.row("kept from an earlier call", 1, "rows")
    (tmp_path / "export.json").write_text(json.dumps([finished]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = gpu.main(["--tiny", "--work", str(tmp_path)])
    torch.set_num_threads(threads)
    lines = path.read_text().splitlines()
    assert lines[0] == "# command: make gpu TINY=1"
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert {row["part"] for row in rows} == set(gpu.PARTS)
    assert [row["what"] for row in rows if row["part"] == "export"] == [
        "kept from an earlier call"
    ]
    assert "not finished" not in {row["unit"] for row in rows}
    ran = {
        row["what"]: row
        for row in rows
        if row["part"] in ("step", "run", "memory", "student", "configurations")
    }
    always = [
        name for name in ran if not name.startswith("peak") and "waits" not in name
    ]
    assert [name for name in always if float(ran[name]["value"]) <= 0] == []
    exact = [
        row
        for row in rows
        if row["part"] == "resume" or "gradients of DDP" in row["what"]
    ]
    assert [float(row["value"]) for row in exact] == [0.0, 0.0, 0.0]  # on a CPU
    warm = [
        row["note"]
        for row in rows
        if row["part"] == "configurations" and row["unit"] == "images/s"
    ]
    assert [note.endswith(", 0 images asked of the teacher") for note in warm] == [
        True,
        True,
    ]
    assert (
        int(float(next(row["value"] for row in rows if row["unit"] == "collected")))
        >= 10
    )


def test_a_part_cut_short_is_reported_and_rerun(tmp_path, monkeypatch):
    options = gpu.arguments(["--work", str(tmp_path)])
    assert gpu.obtain("export", gpu.REAL, options, end=0.0)[0]["unit"] == "not finished"
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(gpu, "__file__", str(slow))
    assert "time was over" in gpu.apart("export", options, 0.2)


HANGS = """
import json, pathlib, sys, time
name, work = sys.argv[2], pathlib.Path(sys.argv[4])
if name == "step":
    time.sleep(60)
row = {"what": str(len(list(work.glob("*.csv")))), "value": 1, "unit": "", "note": ""}
(work / f"{name}.json").write_text(json.dumps([row]))
"""


@pytest.mark.slow
def test_a_part_that_hangs_takes_its_own_time_and_the_csv_is_written_after_each(
    tmp_path, monkeypatch
):
    """As a test that waits for a GPU's other rank would."""
    script = tmp_path / "part.py"
    script.write_text(HANGS)
    monkeypatch.setattr(gpu, "__file__", str(script))
    assert list(gpu.PARTS)[:5] == ["run", "student", "configurations", "step", "tests"]
    assert gpu.PARTS.keys() == gpu.SECONDS.keys()
    path = gpu.main(
        [
            "--work",
            str(tmp_path),
            "--out",
            str(tmp_path),
            "--seconds",
            "5",
            "--minutes",
            "5",
        ]
    )
    rows = list(
        csv.DictReader(
            line for line in path.read_text().splitlines() if not line.startswith("#")
        )
    )
    assert [row["part"] for row in rows if row["unit"] == "not finished"] == ["step"]
    assert [row["what"] for row in rows if row["part"] in ("run", "tests")] == [
        "0",
        "1",
    ]
