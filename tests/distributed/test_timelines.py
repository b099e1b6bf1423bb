"""Each rank says where its own time went."""

from __future__ import annotations

import json

import pytest
from ranks import STEPS

from kd.files.storage import read_rows


def test_each_rank_leaves_its_timeline(plain):
    run = plain(2)
    assert sorted(path.name for path in run.folder.glob("timeline_*")) == ["timeline_0.jsonl", "timeline_1.jsonl"]
    for rank in range(2):
        rows = read_rows(run.folder / f"timeline_{rank}.jsonl")
        assert sum(row["steps"] for row in rows) == STEPS
        for row in rows:
            assert sum(row["ms"].values()) == pytest.approx(row["wall_ms"], abs=0.02)
        assert sum(row["ms"].get("communication", 0.0) for row in rows) > 0
    assert isinstance(json.loads((run.folder / "findings.json").read_text()), list)
    assert "where the time of 20 steps went" in run.world.logs[0]
    assert "where the time" not in run.world.logs[1]
    assert all({"ms_communication", "ms_wait"} <= row.keys() for row in run.rows("train")[2:])
