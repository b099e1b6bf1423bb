"""What a run says while it goes: once, in a person's words."""

from __future__ import annotations

import shutil


def test_the_table_of_time_comes_once_and_a_resumed_run_says_from_where(written, command, tmp_path):
    """Three tables (teacher, student, labels only) with rows of 0.0 %; a resumed run said nothing."""
    path = written(run={"epochs": 2})
    first = command("train", path, "run.baseline=true")
    assert first.code == 0, first
    table = [line for line in first.out.splitlines() if " s " in line and line.startswith("  ")]
    assert first.out.count("where the time of") == 1
    assert table
    assert not any(" 0.0 %" in line for line in table)
    assert "resumes from" not in first.out
    newest, *_ = sorted((tmp_path / "runs").glob("*/checkpoints/step_*"), reverse=True)
    step = int(newest.name.removeprefix("step_"))
    shutil.rmtree(newest)
    again = command("train", path, "run.baseline=true")
    assert again.code == 0, again
    assert f"resumes from step {step // 2}" in again.out
