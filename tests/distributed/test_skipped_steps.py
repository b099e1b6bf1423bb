"""An infinite loss on one of two ranks: both name it, or both leave out its steps, also
after a kill.
"""

from __future__ import annotations

from test_resume import same_bits

# image 7 is in the share of one rank only, in one step of most epochs of three steps
BAD = (
    "losses=[{kind: outside.overflowing, image: 7}]",
    "optimizer.zero=true",
    "optimizer.ema_decay=0.9",
)
SKIP = (*BAD, "optimizer.on_nonfinite=skip")


def test_two_ranks_stop_in_the_same_step_and_one_names_the_term(train):
    world = train("infinite", 2, *BAD).world
    assert world.codes == [2, 2], world.logs
    last = [log.strip().splitlines()[-1] for log in world.logs]
    steps = {
        line.partition("became NaN or infinite in ")[2].partition(";")[0]
        for line in last
    }
    assert len(steps) == 1
    assert min(steps).startswith("step ")
    assert sorted(
        "first in loss term 'outside.overflowing'" in line for line in last
    ) == [False, True]
    assert sorted("not in this rank's images" in line for line in last) == [False, True]


def test_two_ranks_skip_the_same_steps_and_resume_to_the_same_bits(train, plain):
    killed = train("infinite-killed", 2, *SKIP, env={"KD_DIE": "1:13"})
    assert killed.world.codes[1] == -9
    resumed = train("infinite-killed", 2, *SKIP)
    undisturbed = plain(2, *SKIP)
    resumed.world.ended_well()
    assert same_bits(resumed.checkpoint(), undisturbed.checkpoint())
    assert all(tensor.isfinite().all() for tensor in undisturbed.checkpoint().values())
    skipped = [(row["step"], row["skipped"]) for row in undisturbed.rows("train")]
    assert sum(count for _, count in skipped) > 1
    assert skipped == [(row["step"], row["skipped"]) for row in resumed.rows("train")]
    before = [
        row["loss"]
        for row in train("infinite", 2, *SKIP).rows("train")
        if not row["skipped"]
    ]
    assert before == [
        row["loss"] for row in undisturbed.rows("train") if not row["skipped"]
    ]  # begun with `error`
