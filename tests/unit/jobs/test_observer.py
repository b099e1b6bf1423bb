"""A whole run with a slow source: what is shown while it goes and at its end, and what
it leaves.
"""

import json
import re
import time
from pathlib import Path

import pytest
from pieces import base

from kd import config
from kd.files.storage import read_rows
from kd.jobs import observe as _observe
from kd.jobs.train import train

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_a_slow_source_is_named_while_the_run_goes(
    written, command, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(_observe, "LIVE_SECONDS", 0.0)
    path = written(
        data={"kind": "sabotage.source", "sleep_ms": 8},
        profile={"steps": [8, 9]},
        run={"steps": 40},
    )
    result = command("train", path)
    assert result.code == 0, result
    lines = result.out.splitlines()
    folder = tmp_path / "runs" / "tiny"

    findings = json.loads((folder / "findings.json").read_text())
    (slow,) = [finding for finding in findings if finding["rule"] == "IOBottleneck"]
    assert (slow["severity"], slow["key"], slow["value"]) == (
        "warning",
        "data.store",
        "ram",
    )
    findings_at = [
        i
        for i, line in enumerate(lines)
        if line.startswith("IOBottleneck: a step waits ")
    ]
    table = next(
        i
        for i, line in enumerate(lines)
        if line == "tiny: where the time of 40 steps went"
    )
    assert [i < table for i in findings_at] == [
        True,
        False,
    ]  # once while it went, and at the end
    assert re.search(
        r"step 40 .* images/s, \d+\.\d ms per step, data wait \d+\.\d %", result.out
    )

    rows = {
        line.split()[0]: float(line.split()[1])
        for line in lines[table + 1 :]
        if line.startswith("  ")
    }
    timeline = read_rows(folder / "timeline_0.jsonl")
    listed = sum(seconds for name, seconds in rows.items() if name != "all")
    hidden = (
        12 * _observe.SHOWN_SHARE * rows["all"]
    )  # a row below that share is left out
    assert listed == pytest.approx(
        rows["all"], abs=0.005 * len(rows) + hidden
    )  # two decimals are printed
    assert sum(row["wall_ms"] for row in timeline) / 1000 == pytest.approx(
        rows["all"], abs=0.01
    )
    assert rows["data"] >= 40 * 8 * 0.004
    assert {path.name for path in (folder / "profile").iterdir()} == {
        "trace.json.gz",
        "operators.txt",
        "operators.json",
    }
    words = (folder / "profile" / "operators.txt").read_text().split()
    assert {"forward", "backward"} <= set(words)

    resumed = command("train", path)
    assert resumed.code == 0, resumed
    assert "where the time" not in resumed.out  # it made no step
    assert read_rows(folder / "timeline_0.jsonl")[:-1] == timeline
    assert read_rows(folder / "timeline_0.jsonl")[-1]["kind"] == "setup"


def test_a_source_that_waits_in_every_other_batch_is_named(
    written, command, tmp_path, monkeypatch
):
    """160 ms of waiting, beside some 20 ms of a step."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    path = written(
        data={"kind": "sabotage.source", "sleep_ms": 20, "turns": 8},
        run={"steps": 60},
    )
    result = command("train", path)
    assert result.code == 0, result
    (line,) = [
        line for line in result.out.splitlines() if line.startswith("RecurringSteps")
    ]
    assert "one step in 2 takes " in line
    # on a busy machine most of the loading may wait for a core
    assert "wait for data: " in line
    assert line.count("data.store=ram") == 1
    findings = json.loads((tmp_path / "runs" / "tiny" / "findings.json").read_text())
    assert "RecurringSteps" in {finding["rule"] for finding in findings}


def test_the_tables_of_a_command_account_for_all_of_its_time(photos, tmp_path):
    """From when the command began: process start and imports belong to it. A fit, the
    run and its baseline follow.
    """
    values = base(photos, tmp_path)
    values["run"] |= {"baseline": True, "steps": 4, "epochs": 1}
    values["teacher"] |= {"min_accuracy": 0}
    values["teacher"]["fit"]["epochs"] = 1
    settings = config.load(values)
    begin = time.perf_counter()
    train(settings, before=100.0)
    seconds = time.perf_counter() - begin + 100.0
    folders = [
        next(tmp_path.glob("teachers/*/")),
        tmp_path / "runs" / "tiny",
        tmp_path / "runs" / "tiny" / "baseline",
    ]
    tables = [
        sum(row["wall_ms"] for row in read_rows(folder / "timeline_0.jsonl")) / 1000
        for folder in folders
    ]
    assert tables[0] > 100.0 > tables[1] + tables[2]
    billable = json.loads((folders[1] / "manifest.json").read_text())[
        "billable_seconds"
    ]
    assert 100.0 < sum(tables) <= billable <= seconds
