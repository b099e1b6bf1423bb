"""`teacher.shard`: a share of the weights on each rank, and the unsharded teacher's
answers to the last bit.
"""

from __future__ import annotations

import json

import pytest
import timm
import torch
from pieces import Trained, fitted, slow, tiny
from ranks import HERE, start
from test_resume import same_bits

SHARD = "teacher.shard=true"
STAND_IN = HERE.parent / "contracts" / "smddp_stand_in"


@pytest.mark.parametrize("ranks", [2, slow(3)])
def test_logits_are_the_whole_teachers_to_the_last_bit(tmp_path, ranks):
    start("dividing:main", ["shared", tmp_path], ranks, path=(HERE,)).ended_well()
    facts = [
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)
    ]
    for rank in facts:
        for name, case in rank.items():
            assert case["equal"], name
            assert case["on_meta"] == (rank is not facts[0]), name
    for name in facts[0]:
        shares = [rank[name]["mib"] / rank[name]["whole_mib"] for rank in facts]
        buffers = (
            facts[0][name]["buffers_mib"] / facts[0][name]["whole_mib"]
        )  # these lie whole on each rank
        assert sum(shares) == pytest.approx(1 + (ranks - 1) * buffers), name
        assert max(shares) - buffers < 1.1 / ranks, (name, shares)
        again = [rank[name]["mib_after"] / rank[name]["whole_mib"] for rank in facts]
        assert again == shares, "a forward left gathered weights behind"


@pytest.mark.parametrize("ranks", [2, slow(3)])
def test_a_run_with_a_sharded_teacher_is_the_same_run(train, plain, ranks):
    overrides = (
        "teacher.micro_batch=2",
        "data.micro_batch=4" if ranks == 3 else "data.micro_batch=3",
    )
    undivided = plain(ranks, *overrides)
    sharded = train(f"sharded-{ranks}", ranks, SHARD, *overrides)
    sharded.world.ended_well()
    assert same_bits(undivided.checkpoint(), sharded.checkpoint())
    assert undivided.losses() == sharded.losses()
    timeless = [
        {k: v for k, v in run.rows("val")[-1].items() if k != "seconds"}
        for run in (undivided, sharded)
    ]
    assert timeless[0] == timeless[1]
    manifest = sharded.manifest()
    mib = manifest["teacher_mib"]
    assert mib["rank"] / mib["whole"] == pytest.approx(1 / ranks, abs=0.05)
    assert sharded.rows("train")[-1]["teacher_mib"] == mib["rank"]
    assert (
        f"{mib['rank']:.2f} of {mib['whole']:.2f} MiB on this rank"
        in sharded.world.logs[0]
    )


@pytest.mark.slow
def test_a_sharded_teacher_runs_in_float32_and_a_run_resumes_unsharded(train):
    auto = (
        "teacher.precision=auto",
        "teacher.attention=auto",
        "backend.precision=auto",
        "run.every.evaluate=10",
    )
    killed = train("sharded-auto", 2, SHARD, *auto, env={"KD_DIE": "1:13"})
    assert killed.world.codes[1] == -9, killed.world.logs[1]
    assert "lost the other ranks" in killed.world.logs[0]
    modes = killed.manifest()["modes"]
    assert (
        modes["teacher"] == "fp32+unfused"
    )  # a divided teacher is not compared with itself in another precision
    resumed = train("sharded-auto", 2, *auto)
    resumed.world.ended_well()
    assert len(resumed.rows("train")) == 20


@pytest.mark.parametrize(
    ("ranks", "backend", "text"),
    [
        (1, {"kind": "cpu"}, "teacher.shard: is true, but there is one process."),
        (
            2,
            {"kind": "smddp", "device": "cpu"},
            "teacher.shard: is true, but this release of smddp refuses",
        ),
    ],
)
def test_impossible_sharding_is_refused_before_a_fit(
    changed_file, tmp_path, ranks, backend, text
):
    teacher = fitted(tmp_path / "teachers")
    file = changed_file(
        backend={"precision": "fp32", "timeout_seconds": 20, **backend}, teacher=teacher
    )
    argv = [file, f"run.folder={tmp_path}", SHARD]
    env = {"SMDDP_REFUSES_ALLGATHER": "1"}
    world = start("kd.cli.training:train", argv, ranks, env, path=(HERE, STAND_IN))
    assert world.codes == [2] * ranks, world.logs
    assert text in world.logs[0]
    assert not (tmp_path / "teachers").exists()


@pytest.mark.parametrize(
    "size",
    [{}, {"img_size": 32}],
    ids=["by rank 0's file alone", "by the configuration"],
)
def test_a_size_that_rank_0_alone_reads_is_refused(changed_file, tmp_path, size):
    """A trainer wrote beside the weights that they are for 32 px; other ranks have no
    file.
    """
    section = tiny(2, 48)
    args = {**section["args"], **size}
    network = timm.create_model(
        section["model"], num_classes=3, **{**args, "img_size": 32}
    )
    torch.save(
        {"state_dict": network.state_dict(), "args": {"img_size": 32}},
        tmp_path / "a.pth",
    )
    teacher = {
        "model": section["model"],
        "args": args,
        "checkpoint": str(tmp_path / "a.pth"),
        "min_accuracy": 0.0,
    }
    file = changed_file(
        backend={"kind": "cpu", "precision": "fp32", "timeout_seconds": 20},
        teacher=teacher,
    )
    world = start(
        "kd.cli.training:train",
        [file, f"run.folder={tmp_path}", "run.steps=1", SHARD],
        2,
        path=(HERE,),
    )
    assert (world.codes == [0, 0]) == bool(size), world.logs
    assert ("the weights are for 32 px, which rank 0 alone knows" in world.logs[1]) == (
        not size
    )


@pytest.mark.slow
def test_a_sharded_teacher_over_smddp_is_the_same_run(changed_file, plain, tmp_path):
    """AWS documents AllGather for P4d and P4de. On the stand-in, which is gloo."""
    file = changed_file(
        backend={
            "kind": "smddp",
            "device": "cpu",
            "precision": "fp32",
            "timeout_seconds": 20,
        }
    )
    argv = [file, f"run.folder={tmp_path}", "run.name=over", SHARD]
    start("kd.cli.training:train", argv, 2, path=(HERE, STAND_IN)).ended_well()
    assert same_bits(Trained(tmp_path / "over").checkpoint(), plain(2).checkpoint())
