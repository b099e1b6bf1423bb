"""A rank that the others wait for is named: it was stopped, or it comes too late."""

from __future__ import annotations

import socket

import pytest
from ranks import start

WORDS = {"stopped": "does not respond", "asleep": "has not come to the step"}


@pytest.mark.parametrize(("rank", "how"), [(1, "stopped"), (0, "stopped"), (1, "asleep"), (0, "asleep")])
def test_a_straggler_is_named(rank, how):
    world = start("straggling:main", [rank, how], 3)
    others = [log for other, log in enumerate(world.logs) if other != rank]
    named = f"rank {rank} on host {socket.gethostname()}"
    lines = [line for log in world.logs for line in log.splitlines()]
    warned = [line for line in lines if line.startswith("backend: the other ranks wait")]
    assert len(warned) == 1, world.logs  # one line, before the deadline is over
    assert named in warned[0]
    assert WORDS[how] in warned[0]
    for log in others:
        last = log.splitlines()[-1]
        assert "backend: rank " in last
        assert named in last
        assert WORDS[how] in last
    assert [code for other, code in enumerate(world.codes) if other != rank] == [2, 2]


def test_nobody_is_named_where_all_ranks_take_long():
    world = start("straggling:main", [-1, "asleep"], 2)
    assert not any("wait" in log for log in world.ended_well().logs)
