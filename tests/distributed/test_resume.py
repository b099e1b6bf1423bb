"""Killed and resumed, in the same world and in another one; the launcher's restart;
what the survivors say.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from pieces import Trained, slow, without_clocks
from ranks import STEPS, environment, free_port, start
from test_equal_worlds import difference

ZERO = ("optimizer.zero=true", "optimizer.ema_decay=0.9")
SGD = ("optimizer.kind=sgd", "optimizer.lr=0.05", "data.micro_batch=4")
# batch norm, whose statistics are each rank's own until an evaluation or a checkpoint
NORM = (
    "student.model=xcit_nano_12_p8_224",
    "student.args.cls_attn_layers=1",
    "optimizer.ema_decay=0.9",
)
# most weights are of a convolution: the network then keeps channels last in memory
CONVOLVED = ("student.args.patch_size=16", "optimizer.ema_decay=0.9")
MUON = ("optimizer.kind=muon", "optimizer.lr=0.01", "optimizer.zero=true")
LONE = ("optimizer.ema_decay=0.9",)
# thawed at step 15
TUNED = (
    "student.tuning.layer_decay=0.75",
    "student.tuning={head_lr_scale: 4, freeze: [patch_embed.*], freeze_epochs: 5}",
    "optimizer.zero=true",
    *NORM,
)
SIFTED = ("sifter.history=true", "optimizer.zero=true")


def same_bits(first, second) -> bool:
    """Return whether two checkpoints hold the same tensors, bit by bit."""
    if first.keys() != second.keys():
        return False
    raw = [
        [tensors[name].flatten().view(torch.uint8) for name in first]
        for tensors in (first, second)
    ]  # NaN equals NaN here
    return all(torch.equal(*pair) for pair in zip(*raw, strict=True))


@pytest.mark.parametrize(
    ("ranks", "overrides", "die", "step"),
    [
        pytest.param(1, LONE, "0:13", 10, id="one rank, AdamW, average"),
        slow(1, SGD, "0:24", 5, id="one rank, SGD, between micro-batches"),
        pytest.param(2, ZERO, "1:13", 10, id="two ranks, ZeRO, average"),
        pytest.param(
            2, SIFTED, "1:13", 10, id="two ranks, sifted, in the middle of an epoch"
        ),
        slow(1, CONVOLVED, "0:13", 10, id="one rank, channels last"),
        slow(
            2,
            (*CONVOLVED, "optimizer.zero=true"),
            "1:13",
            10,
            id="two ranks, ZeRO, channels last",
        ),
        slow(1, MUON, "0:13", 10, id="one rank, muon"),
        slow(2, MUON, "1:13", 10, id="two ranks, ZeRO, muon"),
        slow(2, NORM, "0:8", 5, id="two ranks, batch norm, average"),
        slow(
            2,
            TUNED,
            "1:13",
            10,
            id="two ranks, ZeRO, frozen for a while, rates of layers",
        ),
    ],
)
def test_a_killed_run_resumes_to_the_same_bits(
    train, plain, ranks, overrides, die, step
):
    name = f"killed-{ranks}-{'-'.join(overrides[0].split('.')[1:])}"
    killed = train(name, ranks, *overrides, env={"KD_DIE": die})
    victim = int(die[0])
    assert killed.world.codes[victim] == -9, killed.world.logs
    assert (
        sorted(
            folder.name for folder in (killed.folder / "checkpoints").glob("step_*")
        )[-1]
        == f"step_{step:08d}"
    )
    assert not (killed.folder / "checkpoints" / f"step_{STEPS:08d}").exists()
    if ranks > 1:
        survivor = 1 - victim
        assert killed.world.codes[survivor] == 2
        assert killed.world.seconds[survivor] - killed.world.seconds[victim] < 5
        last = killed.world.logs[survivor].strip().splitlines()[-1]
        assert "lost the other ranks" in last
        assert "the same command resumes" in last
    resumed = train(name, ranks, *overrides)
    resumed.world.ended_well()
    undisturbed = plain(ranks, *overrides)
    assert same_bits(resumed.checkpoint(), undisturbed.checkpoint())
    rows = [without_clocks(run.rows("train")) for run in (resumed, undisturbed)]
    assert rows[0] == rows[1]
    assert resumed.rows("val")[-1]["nll"] == undisturbed.rows("val")[-1]["nll"]


@pytest.mark.slow
def test_three_sifted_ranks_make_equal_steps_and_resume(train, plain):
    # Not to the bit: DDP lays its buckets out anew after its first step, and three
    # ranks' sum depends on the layout.
    killed = train("three", 3, *SIFTED, env={"KD_DIE": "0:8"})
    assert killed.world.codes[0] == -9
    resumed = train("three", 3, *SIFTED)
    undisturbed = plain(3, *SIFTED)
    resumed.world.ended_well()
    assert len(undisturbed.ids(3, 1)) == STEPS  # as many on each rank
    trained = [(row["epoch"], row["trained"]) for row in undisturbed.rows("epoch")]
    assert trained[:3] == [(1, 36), (2, 24), (3, 24)]
    assert trained == [(row["epoch"], row["trained"]) for row in resumed.rows("epoch")]
    assert torch.equal(
        resumed.checkpoint()["sifter.seen"], undisturbed.checkpoint()["sifter.seen"]
    )
    assert difference(resumed.checkpoint(), undisturbed.checkpoint()) < 1e-4


@pytest.mark.slow
def test_a_run_goes_on_in_a_world_of_another_size(train, plain):
    # without dropout, whose draws belong to a rank: then only the order of sums differs
    overrides = ("optimizer.zero=true", "student.args.drop_rate=0", "optimizer.lr=3e-4")
    killed = train("regrouped", 2, *overrides, env={"KD_DIE": "0:17"})
    assert killed.world.codes[0] == -9
    resumed = train("regrouped", 3, *overrides)
    resumed.world.ended_well()
    assert "3 ranks x 1 micros x 4" in resumed.world.logs[0]
    undisturbed = plain(2, *overrides)
    assert same_bits(
        resumed.checkpoint(15), undisturbed.checkpoint(15)
    )  # where it was taken up
    assert not same_bits(resumed.checkpoint(), undisturbed.checkpoint())  # other sums
    assert difference(resumed.checkpoint(), undisturbed.checkpoint()) < 1e-4
    assert resumed.rows("train")[-1]["loss"] == pytest.approx(
        undisturbed.rows("train")[-1]["loss"], rel=1e-4
    )


@pytest.mark.slow
def test_torchrun_restarts_a_killed_world_and_it_ends_with_the_same_bits(
    config_file, plain, tmp_path
):
    # with a data worker, which outlives its killed trainer for some seconds and must
    # not hold the run's lock
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    argv += [
        "--max-restarts",
        "1",
        "-m",
        "kd.cli",
        "train",
        str(config_file),
        *ZERO,
        "data.workers=1",
    ]
    argv += [f"run.folder={tmp_path}", "run.name=restarted"]
    env = {"KD_DIE": "0:13", "KD_DIE_ONCE": str(tmp_path / "died")}
    env = {**environment(), **env}
    env["PYTHONPATH"] += ":" + str(sys.modules["ranks"].HERE)
    process = subprocess.run(
        argv, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert (tmp_path / "died").exists()
    undisturbed = plain(2, *ZERO)
    assert same_bits(
        Trained(tmp_path / "restarted").checkpoint(), undisturbed.checkpoint()
    )


@pytest.mark.parametrize("launcher", [slow("mpirun"), "sagemaker"])
def test_every_launcher_starts_the_same_run(train, plain, launcher):
    started = train(f"under-{launcher}", 2, *ZERO, launcher=launcher)
    started.world.ended_well()
    assert same_bits(started.checkpoint(), plain(2, *ZERO).checkpoint())


@pytest.mark.slow
@pytest.mark.parametrize("device", ["--multi_gpu", "--cpu"])
def test_ranks_that_accelerate_starts_train_with_torchruns_bits(
    config_file, plain, tmp_path, device
):
    """On GPUs it runs torchrun, also where there is none; on CPUs mpirun."""
    if device == "--cpu" and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    launch = [
        *(sys.executable, "-m", "accelerate.commands.launch", device),
        *("--num_machines", "1", "--num_processes", "2"),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--main_process_port", str(free_port())),
        *(("--mpirun_hostfile", str(hosts)) if device == "--cpu" else ()),
    ]
    keys = ("run.steps=6", "run.every.checkpoint=6", "sifter={kind: none}")
    argv = ["-m", "kd.cli", "train", str(config_file), *keys]
    argv += [f"run.folder={tmp_path}", "run.name=launched"]
    may_be_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    process = subprocess.run(
        [*launch, *argv],
        env={**environment(), **may_be_root},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    launched = Trained(tmp_path / "launched")
    torchrun = plain(2, *keys)
    assert len(torchrun.losses()) == 6
    assert launched.losses() == torchrun.losses()
    assert same_bits(launched.checkpoint(), torchrun.checkpoint())


def test_a_rank_that_never_comes_is_one_line(config_file, tmp_path):
    env = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    argv = [config_file, f"run.folder={tmp_path}", "backend.timeout_seconds=2"]
    world = start("kd.cli.training:train", argv, env=env)
    assert world.codes == [2]
    lines = [
        line for line in world.logs[0].splitlines() if not line.startswith("[W")
    ]  # torch's own warnings
    assert len(lines) == 1, world.logs[0]
    assert "within 2 s" in lines[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("env", "text"),
    [
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "2"},
            "MASTER_ADDR and MASTER_PORT is not set",
            id="no address",
        ),
        pytest.param({"WORLD_SIZE": "2"}, "torchrun's environment", id="no rank"),
        pytest.param(
            {"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2", id="a rank too many"
        ),
        pytest.param(
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            "mpirun",
            id="mpirun",
        ),
        pytest.param({"SM_HOSTS": '["algo-1", "algo-2"]'}, "2 hosts", id="SageMaker"),
    ],
)
def test_a_missing_rank_or_address_is_one_line(config_file, tmp_path, env, text):
    world = start(
        "kd.cli.training:train", [config_file, f"run.folder={tmp_path}"], env=env
    )
    assert world.codes == [2]
    assert len(world.logs[0].splitlines()) == 1
    assert text in world.logs[0]
