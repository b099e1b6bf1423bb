"""The rules on what runs have recorded: healthy ones, and runs slowed down on purpose in one way each.

The records are written by `python benchmarks/rules.py --record tests/unit/monitor/recorded`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kd.monitor import rules
from kd.monitor.evidence import Evidence, Facts
from kd.monitor.rules import RULES, find

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_run_is_diagnosed(path, monkeypatch):
    """As what it is; a healthy one as nothing. `slow_start` is 2 seconds and not 30, as in the benchmark."""
    monkeypatch.setattr(rules, "SETUP_SECONDS", 2.0)
    told = json.loads(path.read_text())
    timelines = {int(rank): rows for rank, rows in told["timelines"].items()}
    found = {one.rule: one for one in find(Evidence(timelines, told["samples"], Facts(**told["facts"])))}
    if not told["rule"]:
        assert found == {}
    else:
        one = found[told["rule"]]
        assert told["facts"].get(one.key.removeprefix("data.")) != one.value  # no advice to keep things as they are


def test_what_is_recorded():
    """A healthy run of one rank and of two, and all rules but two: one needs a GPU, one a machine with idle cores."""
    found = [json.loads(path.read_text())["rule"] for path in RECORDED]
    assert found.count("") >= 2
    missing = {rule.__name__.replace("_", "") for rule in RULES} - {name.lower() for name in found}
    assert missing == {"lowgpuutilization", "overallsystemusage"}
