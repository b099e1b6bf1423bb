"""Decoders that start late, on a stand-in of Ray with a clock of its own; tests/remote
has a real cluster.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("ray")

from kd.cluster import decoders
from kd.cluster.decoders import PACKAGES, Pool, pack
from kd.cluster.ray_cluster import decoding_versions
from kd.cluster.remote import RemoteLoader
from kd.core.types import Plan, Sample
from kd.data.loader import Fetch, Share

DECODERS = 3
DEADLINE = 30.0
IMAGES = 24


class Colours:
    """A dataset whose image `id` of view `v` shows the colour (id, v, 0)."""

    classes: Sequence[str] = ("even", "odd")

    def __len__(self) -> int:
        return IMAGES

    def load(self, id: int, view: int) -> Sample:
        pixels = torch.tensor([id, view, 0], dtype=torch.uint8).view(3, 1, 1)
        return Sample(pixels, id % 2, id % 2, 1.0)


class Cluster:
    """A stand-in of the module ray: each decoder starts at its second of `starts`."""

    def __init__(self, starts: list[float]) -> None:
        self.starts = starts
        self.now = 0.0
        self.util = SimpleNamespace(list_named_actors=lambda: self.actors)
        self.actors: dict[str, Any] = {}
        versions = decoding_versions(*PACKAGES)
        self.pong = ("host", "127.0.0.3", versions)

    def put(self, value: Any) -> Any:
        return value

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(len(self.starts))}

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=self.options)

    def options(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(remote=lambda datasets, _: self.start(name, datasets[0]))

    def start(self, name: str, datasets: list[Any]) -> Any:
        begin = self.starts[len(self.actors)]

        def load(number: int, request: Any) -> tuple[float, Any]:
            return self.now, pack(Fetch(datasets[number])[request])

        self.actors[name] = SimpleNamespace(
            ping=SimpleNamespace(remote=lambda: (max(begin, self.now), self.pong)),
            load=SimpleNamespace(remote=load),
        )
        return self.actors[name]

    def get_actor(self, name: str) -> Any:
        return self.actors[name]

    def wait(
        self, refs: list[Any], num_returns: int = 1, timeout: float = math.inf
    ) -> tuple[list[Any], list[Any]]:
        due = sorted(ref[0] for ref in refs)[num_returns - 1]
        self.now = max(self.now, min(due, self.now + timeout))
        ready = [ref for ref in refs if ref[0] <= self.now]
        return ready[:num_returns], [ref for ref in refs if ref not in ready]

    def get(self, ref: Any, timeout: float = math.inf) -> Any:
        return ref[1]


@pytest.fixture
def world(monkeypatch, caplog):
    """Return the loaders of two ranks in a cluster of decoders that start when told."""
    caplog.set_level(logging.INFO, logger="kd")
    monkeypatch.setattr(decoders, "connect", lambda where: None)
    monkeypatch.setattr(decoders, "_owned", [])

    def make(*starts: float) -> tuple[Cluster, list[RemoteLoader]]:
        cluster = Cluster(list(starts))
        monkeypatch.setattr(decoders, "ray", cluster)
        clock = SimpleNamespace(monotonic=lambda: cluster.now)
        monkeypatch.setattr(decoders, "time", clock)
        dataset = Colours()
        pools = [Pool([dataset], rank, 7, DEADLINE) for rank in range(2)]
        for pool in pools:
            pool.wait_for_decoders()
        return cluster, [
            RemoteLoader(pool, 0, dataset, Share(8, 1, rank, 2))
            for rank, pool in enumerate(pools)
        ]

    return make


def train(loaders: list[RemoteLoader]) -> list[int]:
    """Make a pass on each rank; return how many images each made itself."""
    made_before = [loader.made_here for loader in loaders]
    for loader in loaders:
        plan = Plan(ids=torch.arange(IMAGES), weights=torch.ones(IMAGES))
        batches = list(loader.epoch(plan, 1))
        assert sum(len(batch.ids) for batch in batches) == IMAGES // 2
    return [
        loader.made_here - before
        for loader, before in zip(loaders, made_before, strict=True)
    ]


def test_a_run_waits_for_decoders_that_start_slowly(world, caplog):
    """Where they took more than the deadline of a call, as on a busy machine, the
    trainers made every image of a short run.
    """
    cluster, loaders = world(DEADLINE * 1.5, DEADLINE * 1.6, DEADLINE * 1.7)
    assert train(loaders) == [0, 0]
    assert cluster.now == DEADLINE * 1.7
    assert caplog.messages == []


def test_a_run_begins_without_a_decoder_that_never_starts(world, caplog):
    cluster, loaders = world(5.0, math.inf, math.inf)
    assert cluster.now == 5.0 + 2 * DEADLINE  # both ranks wait here one after the other
    assert train(loaders) == [0, 0]
    (line,) = caplog.messages
    assert "1 of 3 decoders have started" in line


def test_a_run_without_decoders_says_so_once_and_takes_them_when_they_come(
    world, caplog
):
    """It was two lines, one of each rank."""
    came = 1000.0
    cluster, loaders = world(*[came] * DECODERS)
    assert cluster.now < came
    assert train(loaders) == [IMAGES // 2] * 2
    assert train(loaders) == [IMAGES // 2] * 2
    started, share = caplog.messages
    assert "0 of 3 decoders have started" in started
    assert "rank 0 made 100.0 %" in share
    caplog.clear()
    cluster.now = came
    assert train(loaders) == [0, 0]
    assert train(loaders) == [0, 0]
    (share,) = caplog.messages
    assert "rank 0 made 0.0 %" in share


def test_a_cluster_without_cpus_is_one_line(world, caplog):
    _, loaders = world()
    assert train(loaders) == [IMAGES // 2] * 2
    assert "0 of 0 decoders have started" in caplog.messages[0]


def test_decoders_that_come_within_a_pass_make_its_rest(world):
    cluster, (loader, _) = world(*[1000.0] * DECODERS)
    plan = Plan(ids=torch.arange(IMAGES).repeat(10), weights=torch.ones(IMAGES * 10))
    batches = loader.epoch(plan, 1)
    next(batches)
    cluster.now = 1000.0
    rest = list(batches)
    assert len(rest) == IMAGES * 10 // 8 - 1
    assert 0 < loader.made_here < 8 * 4  # the batches that were made ahead
