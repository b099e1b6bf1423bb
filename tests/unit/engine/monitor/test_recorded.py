"""The rules on what runs have recorded: healthy ones, and runs slowed down on purpose
in one way each.

The records are those of `python benchmarks/rules.py --record FOLDER`, on two cores
beside other programs. So the run without a worker is told that its cores are full.
"""

import json
from pathlib import Path

import pytest

from kd.engine.monitor.evidence import Evidence, Facts
from kd.engine.monitor.rules import find_bottlenecks

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_run_is_diagnosed(path):
    """As what it is; a healthy one as nothing."""
    record = json.loads(path.read_text())
    timelines = {int(rank): rows for rank, rows in record["timelines"].items()}
    findings = {
        each.rule: each
        for each in find_bottlenecks(
            Evidence(timelines, record["samples"], Facts(**record["facts"]))
        )
    }
    if path.stem.startswith("healthy"):
        assert findings == {}
    else:
        finding = findings[record["rule"]]
        # not what is set already
        assert record["facts"].get(finding.key.removeprefix("data.")) != finding.value
