"""`kd.sifting` in worlds of two and three ranks: equal numbers of batches, whatever
their losses and shards are.
"""

from __future__ import annotations

import json

import pytest
from pieces import slow
from ranks import start


@pytest.mark.parametrize("ranks", [2, slow(3)])
def test_all_ranks_take_the_same_steps_and_none_waits_forever(ranks):
    world = start("sifted:main", [], ranks, timeout=60).ended_well()
    by_rank = [json.loads(log.splitlines()[-1]) for log in world.logs]
    assert len(by_rank[0]) == 8
    for case, (lengths, _, _, weight, reductions) in by_rank[0].items():
        for facts in by_rank[1:]:
            assert facts[case][0] == lengths, case
            assert facts[case][3] == weight, case
        assert sum(lengths) > 12, case  # beyond the delay
        # Equal shards compare notes once an epoch; the others before each batch too,
        # and once more to stop.
        assert reductions == (5 if case == "fixed, equal" else 5 + sum(lengths) + 5), (
            case
        )
    _, images, waiting, _, _ = by_rank[0]["fixed, equal"]
    assert images == 5 * -(
        -103 // ranks
    )  # nothing of a shard is lost where shards are equal
    assert waiting < 4
    assert (
        len({facts["bernoulli, streams"][1] for facts in by_rank}) > 1
    )  # each rank kept by its own losses
