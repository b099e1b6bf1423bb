"""Ranks that do not begin with the same stop together, each with one line, before a step is made."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from kd.models.cache import Codec, Store

CACHED = ("teacher.cache.views=2", "teacher.cache.dtype=fp32")


def all_refuse(world, *words) -> None:
    """Require exit code 2 and one line with these words from every rank."""
    assert world.codes == [2] * len(world.codes), world.logs
    for rank, text in enumerate(world.logs):
        lines = [line for line in text.splitlines() if line.startswith("[rank ")]
        assert len(lines) == 1, text
        assert lines[0].startswith(f"[rank {rank}]")
        assert all(word in lines[0] for word in words), text


def test_all_ranks_refuse_a_cache_of_another_teacher(train, tmp_path):
    path = f"teacher.cache.path={tmp_path / 'cache'}"
    train("cache-filled", 2, *CACHED, path, "run.steps=4").world.ended_well()
    train("cache-read", 2, *CACHED, path, "run.steps=4").world.ended_well()
    store = Store(tmp_path / "cache", Codec(3, "fp32", 0), 36, writable=True)
    parts, whole = store.parts(0, range(36))
    ids = np.flatnonzero(whole)
    store.write(0, ids.tolist(), [parts[0].numpy()[ids] + 0.1])
    refused = train("cache-refused", 2, *CACHED, path, "run.steps=4")
    all_refuse(refused.world, "teacher.cache.path:", "differs by 0.1", "Remove the folder")
