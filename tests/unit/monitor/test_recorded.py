"""The rules on what runs have recorded: healthy ones, and runs slowed down on purpose in one way each.

The records are those of `python benchmarks/rules.py --record FOLDER`, on two cores beside other programs. So the run
without a worker is told that its cores are full, and OverallSystemUsage, which needs idle cores, has no record.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kd.monitor import rules
from kd.monitor.evidence import Evidence, Facts
from kd.monitor.rules import find

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_run_is_diagnosed(path, monkeypatch):
    """As what it is; a healthy one as nothing. A start is long from 2 seconds on and not 30, as in the benchmark."""
    monkeypatch.setattr(rules, "SETUP_SECONDS", 2.0)
    told = json.loads(path.read_text())
    timelines = {int(rank): rows for rank, rows in told["timelines"].items()}
    found = {one.rule: one for one in find(Evidence(timelines, told["samples"], Facts(**told["facts"])))}
    if path.stem.startswith("healthy"):
        assert found == {}
    else:
        one = found[told["rule"]]
        assert told["facts"].get(one.key.removeprefix("data.")) != one.value  # no advice to keep things as they are
