"""Storage, processes and ranks that fail in the middle of a run: one line, exit code 2,
and then the same bits.

`KD_SOAK=1` tries every combination; otherwise four of them, in which each fault,
policy, number of workers and of ranks occurs.
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest
from outside.failing import VICTIM
from pieces import slow, write_tar
from test_resume import same_bits

SOAK = bool(os.environ.get("KD_SOAK"))
FAULTS = ("gone", "flaky", "replaced", "shortened")
FEW = [
    slow("gone", "skip", 2, 2),
    ("flaky", "error", 0, 2),
    ("replaced", "skip", 2, 1),
    ("shortened", "skip", 0, 1),
]
ALL = list(itertools.product(FAULTS, ("error", "skip"), (0, 2), (1, 2)))


def shard(root: Path) -> None:
    """Write the images of each split as a shard, and the training shard a second time
    as `whole.tar`.
    """
    for split in ("train", "val"):
        members: dict[str, bytes] = {}
        for number, path in enumerate(sorted((root / split).rglob("*.jpg"))):
            members |= {
                f"{number:04d}.jpg": path.read_bytes(),
                f"{number:04d}.cls": path.parent.name.encode(),
            }
        write_tar(root / f"{split}.tar", members)
    shutil.copyfile(root / "train.tar", root / "whole.tar")


@pytest.mark.parametrize(("fault", "policy", "workers", "ranks"), ALL if SOAK else FEW)
def test_data_that_fails_is_skipped_or_ends_all_ranks_in_one_line(
    train, plain, runs, photos, tmp_path, fault, policy, workers, ranks
):
    root = Path(shutil.copytree(photos, tmp_path / "photos"))
    undisturbed = plain(ranks)
    name = f"failing-{fault}-{policy}-{workers}-{ranks}"
    overrides = [
        "data.kind=outside.failing",
        f"data.root={root}",
        f"data.on_corrupt={policy}",
        "data.max_skipped=0.1",
    ]
    overrides += [f"data.workers={workers}"]
    if fault == "shortened":
        shard(root)
        overrides.append("data.shards=true")
    rows = runs / name / "metrics.jsonl"
    harmed = train(name, ranks, *overrides, env={"KD_HARM": f"{fault}:{rows}"})
    output = "\n".join(harmed.world.logs)
    assert "a bug in kd" not in output
    assert "Traceback" not in output
    if fault == "flaky":
        harmed.world.ended_well()
    elif (fault, policy) == ("replaced", "skip"):
        harmed.world.ended_well()
        assert harmed.manifest()["unreadable"] == [VICTIM]
        assert all(tensor.isfinite().all() for tensor in harmed.checkpoint().values())
        return
    else:
        assert harmed.world.codes == [2] * ranks, output
        expected = {
            "gone": "the storage is away",
            "replaced": VICTIM,
            "shortened": "has become shorter",
        }
        assert expected[fault] in output
        if fault == "gone":
            (tmp_path / "away").rename(root)
        elif fault == "replaced":
            shutil.copyfile(photos / VICTIM, root / VICTIM)
        else:
            shutil.copyfile(root / "whole.tar", root / "train.tar")
        harmed = train(name, ranks, *overrides)
        harmed.world.ended_well()
    assert same_bits(harmed.checkpoint(), undisturbed.checkpoint())


@pytest.mark.skipif(
    not SOAK,
    reason="kills of a rank are in test_resume; KD_SOAK=1 tries the other phases",
)
@pytest.mark.parametrize(
    "sent", ["SIGKILL:val:10", "SIGBUS:train:60", "SIGBUS:val:10", "SIGSTOP:train:60"]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_process_that_ends_or_stands_still_ends_the_others_and_the_run_resumes(
    train, plain, sent, ranks
):
    """A rank that stands still is not waited for without end; it is killed here after
    the others have left.
    """
    if (ranks, sent[:7]) == (1, "SIGSTOP"):
        pytest.skip("a process alone that is stopped simply goes on later")
    overrides = ("data.kind=outside.signalling", "backend.timeout_seconds=5")
    name = f"signal-{sent.replace(':', '-')}-{ranks}"
    env = {"KD_SIGNAL": sent, "KD_SIGNAL_RANK": str(ranks - 1), "KD_SIGNAL_KILL": "15"}
    ended = train(name, ranks, *overrides, env=env)
    assert ended.world.codes[-1] < 0
    assert ended.world.codes[:-1] == [2] * (ranks - 1), ended.world.logs
    if ranks > 1:
        message = (
            "does not respond"
            if sent.startswith("SIGSTOP")
            else "rank 0 lost the other ranks"
        )
        assert message in ended.world.logs[0]
    resumed = train(name, ranks, *overrides)
    resumed.world.ended_well()
    assert same_bits(resumed.checkpoint(), plain(ranks).checkpoint())


@pytest.mark.skipif(
    not SOAK,
    reason="a full disk is in tests/unit/files; KD_SOAK=1 tries it with two ranks",
)
def test_a_full_disk_of_rank_0_ends_all_ranks_and_leaves_no_partial_checkpoint(
    train, plain, small_disk
):
    overrides = (f"run.folder={small_disk}", "optimizer.ema_decay=0.9")
    full = train("full", 2, *overrides)
    assert full.world.codes == [2, 2], full.world.logs
    assert "Free space and run the same command again" in full.world.logs[0]
    assert "rank 1 lost the other ranks" in full.world.logs[1]
    names = [path.name for path in (small_disk / "full" / "checkpoints").iterdir()]
    assert not any(name.startswith(".") for name in names)
