"""`teacher.pipeline`: a stage of the teacher on each rank, and the whole teacher's
answers for every rank's images.
"""

from __future__ import annotations

import json

import pytest
import torch
from ranks import HERE, start

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="pipelines run forward only from torch 2.13 on",
)


@pytest.mark.parametrize(
    ("ranks", "cut"), [(2, {"vit", "xcit", "swin"}), (3, {"vit", "xcit"})]
)
@pytest.mark.slow
def test_every_rank_gets_the_whole_teachers_outputs(tmp_path, ranks, cut):
    start("dividing:main", ["cut", tmp_path], ranks, path=(HERE,)).ended_well()
    facts = [
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)
    ]
    for name in facts[0]:
        by_rank = [rank[name] for rank in facts]
        if name.split(",")[0].split()[0] not in cut:
            assert all("the teacher can be cut at" in text for text in by_rank), name
            continue
        # a batch that is not as large as the first is cut otherwise, and kernels may
        # sum in another order
        assert all(rank["worst"] < 1e-6 < rank["spread"] for rank in by_rank), name
        shares = [rank["mib"] / rank["whole_mib"] for rank in by_rank]
        assert sum(shares) == pytest.approx(1, abs=0.02), name
        assert max(shares) < 0.8, name


@pytest.mark.parametrize(
    "overrides",
    [("data.micro_batch=3",), ("data.micro_batch=6", "teacher.micro_batch=2")],
)
@pytest.mark.slow
def test_a_run_with_a_pipelined_teacher_is_the_same_run(train, plain, overrides):
    undivided = plain(2, *overrides)
    cut = train(f"pipelined-{len(overrides)}", 2, "teacher.pipeline=2", *overrides)
    cut.world.ended_well()
    losses = [run.losses() for run in (undivided, cut)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    last = [run.rows("val")[-1] for run in (undivided, cut)]
    assert last[1]["teacher_nll"] == pytest.approx(last[0]["teacher_nll"], rel=1e-6)
    assert last[1]["teacher_accuracy"] == last[0]["teacher_accuracy"]
    mib = cut.manifest()["teacher_mib"]
    assert 0.2 < mib["rank"] / mib["whole"] < 0.8
    assert "MiB on this rank, divided over 2" in cut.world.logs[0]


@pytest.mark.slow
def test_a_pipelined_teacher_runs_in_float32_and_a_run_resumes_without(train):
    auto = ("teacher.precision=auto", "teacher.attention=auto")
    killed = train(
        "pipelined-auto", 2, "teacher.pipeline=2", *auto, env={"KD_DIE": "1:13"}
    )
    assert killed.world.codes[1] == -9, killed.world.logs[1]
    modes = killed.manifest()["modes"]
    assert (
        modes["teacher"] == "fp32+unfused"
    )  # a divided teacher is not compared with itself in another precision
    resumed = train("pipelined-auto", 2, *auto)
    resumed.world.ended_well()
    assert len(resumed.rows("train")) == 20


@pytest.mark.parametrize(
    ("ranks", "stages", "text"),
    [
        (1, 2, "teacher.pipeline: is 2, but the number of processes is 1."),
        (2, 3, "teacher.pipeline: is 3, but the number of processes is 2."),
        (3, 3, "teacher.pipeline: is 3, but the teacher can be cut at 1 places only."),
    ],
)
def test_an_impossible_pipeline_is_a_one_line_error(
    config_file, tmp_path, ranks, stages, text
):
    argv = [config_file, f"run.folder={tmp_path}", f"teacher.pipeline={stages}"]
    world = start("kd.cli.training:train", argv, ranks, path=(HERE,))
    assert world.codes == [2] * ranks, world.logs
    assert text in world.logs[0]
