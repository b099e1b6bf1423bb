"""`data.batch_size: auto` in worlds of real processes: agreed upon, recorded, pinned."""

from __future__ import annotations

import json

import pytest
from ranks import HERE, start
from test_resume import same_bits

AUTO = "data.batch_size=auto"


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_take_what_fits_on_the_smallest(tmp_path, ranks):
    start("fitting:main", [tmp_path], ranks, path=(HERE,)).ended_well()
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert [size for size, _ in facts] == [8] * ranks
    assert "64 fits, 32 fits, 16 fits, 8 fits" in facts[0][1]
    assert "64 does not, 32 does not, 16 does not, 8 fits" in facts[1][1]


def test_what_was_found_is_recorded_and_pinned(train, plain):
    killed = train("auto", 2, AUTO, env={"KD_DIE": "0:13"})
    assert killed.world.codes[0] == -9, killed.world.logs
    said = killed.world.logs[0]
    manifest = json.loads((killed.folder / "manifest.json").read_text())
    assert manifest["choices"]["batch_size"] == "32"  # 36 images over two ranks: 16 each
    assert "32 images = 2 ranks x 1 micros x 16" in said
    assert f"batch_size auto: {manifest['batch_search']}" in said
    assert "at most 18 images a rank" in manifest["batch_search"]
    resumed = train("auto", 2, AUTO)
    resumed.world.ended_well()
    assert "batch_size auto" not in resumed.world.logs[0]
    fixed = plain(2, "data.batch_size=32")
    assert same_bits(resumed.checkpoint(), fixed.checkpoint())
    assert [row["loss"] for row in resumed.rows("train")] == [row["loss"] for row in fixed.rows("train")]


def test_the_baseline_takes_the_same_batch_and_the_run_can_be_evaluated(train):
    run = train("auto-baseline", 1, AUTO, "run.baseline=true", "run.steps=4", "run.every.evaluate=4")
    run.world.ended_well()
    inner = json.loads((run.folder / "labels_only" / "manifest.json").read_text())
    assert inner["batch"] == "32 images"
    world = start("kd.cli.training:evaluate", [run.folder, "--trust"], path=(HERE,)).ended_well()
    assert "accuracy" in world.logs[0]


def test_zero_says_what_it_gave_back(plain):
    whole, sharded = plain(2), plain(2, "optimizer.zero=true")
    mib = [run.rows("train")[-1]["optimizer_mib"] for run in (whole, sharded)]
    assert f"optimizer state {mib[0]:.2f} MiB on this rank\n" in whole.world.logs[0]
    text = f"optimizer state {mib[1]:.2f} MiB on this rank of {mib[0]:.2f} in all: ZeRO-1 over 2 ranks gave back"
    assert text in sharded.world.logs[0]
