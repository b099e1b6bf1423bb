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
    found = [json.loads(log.splitlines()[-1]) for log in world.logs]
    assert len(found[0]) == 8
    for case, (lengths, _, _, weight, asked) in found[0].items():
        for other in found[1:]:
            assert other[case][0] == lengths, case
            assert other[case][3] == weight, case
        assert sum(lengths) > 12, case  # beyond the delay
        # Equal shards compare notes once an epoch; the others before each batch too,
        # and once more to stop.
        assert asked == (5 if case == "fixed, equal" else 5 + sum(lengths) + 5), case
    _, seen, waiting, _, _ = found[0]["fixed, equal"]
    assert seen == 5 * -(
        -103 // ranks
    )  # nothing of a shard is lost where shards are equal
    assert waiting < 4
    assert (
        len({other["bernoulli, streams"][1] for other in found}) > 1
    )  # each rank kept by its own losses
