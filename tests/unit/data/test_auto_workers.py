"""Two loaders of the same batches, of which the faster one is taken; only the clock is made here."""

from __future__ import annotations

import pytest
import torch
from test_loader import Numbers, plan_of, same

from kd.data import auto_workers
from kd.data.auto_workers import EVERY, FIRST, AutoWorkers
from kd.data.loader import LocalLoader


class Timed(Numbers):
    """Takes its time from a made clock, and counts what it loaded."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        super().__init__(96)
        self.clock, self.seconds, self.loaded, self.uneven = clock, seconds, 0, False

    def load(self, id: int, view: int):
        late = 4 if self.uneven and self.loaded // 8 % 4 == 3 else 0.5 if self.uneven else 1
        self.clock[0] += self.seconds * late
        self.loaded += 1
        return super().load(id, view)


@pytest.fixture
def pair(monkeypatch):
    """Two loaders; how long an image takes in each is given."""
    clock = [0.0]
    monkeypatch.setattr(auto_workers.time, "perf_counter", lambda: clock[0])

    def make(rule: float, other: float, accumulate: int = 1):
        datasets = Timed(clock, rule), Timed(clock, other)
        loaders = [LocalLoader(dataset, 8, accumulate, 0, 1, workers=0) for dataset in datasets]
        lines: list[str] = []
        return AutoWorkers(*loaders, lines.append), datasets, lines

    return make


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("start", [0, 5])
def test_the_batches_are_those_of_one_loader_whatever_is_measured(pair, accumulate, start):
    auto, _, lines = pair(2.0, 1.0, accumulate)
    alone = LocalLoader(Numbers(96), 8, accumulate, 0, 1, workers=0)
    for view in range(40):
        found, wanted = list(auto.epoch(plan_of(96), view, start)), list(alone.epoch(plan_of(96), view, start))
        assert len(found) == len(wanted) == (12 - start) * accumulate
        assert all(same(one, other) for one, other in zip(found, wanted, strict=True))
    assert lines


@pytest.mark.parametrize(("other", "taken"), [(1.0, True), (1.88, True), (1.94, False), (2.0, False), (3.0, False)])
def test_the_other_is_taken_where_it_is_clearly_faster(pair, other, taken):
    auto, datasets, lines = pair(2.0, other)
    for view in range(22):
        list(auto.epoch(plan_of(96), view))
    before = [dataset.loaded for dataset in datasets]
    list(auto.epoch(plan_of(96), 0))
    assert [dataset.loaded - count for dataset, count in zip(datasets, before, strict=True)] == [
        0 if taken else 96,
        96 if taken else 0,
    ]
    assert len(lines) == taken


def test_noise_in_a_few_segments_hides_no_gain_and_makes_none(pair):
    """A neighbour makes everything three times slower, now and then."""
    for other, taken in ((1.7, True), (2.0, False)):
        auto, datasets, lines = pair(2.0, other)
        for view in range(22):
            for dataset, seconds in zip(datasets, (2.0, other), strict=True):
                dataset.seconds = seconds * (3 if view % 7 == 5 else 1)
            list(auto.epoch(plan_of(96), view))
        assert len(lines) == taken


def test_a_loader_that_is_late_with_every_fourth_batch_is_not_fast(pair):
    """Most of its batches take half of the time of the other's, and all together 1.375 times as long."""
    auto, datasets, lines = pair(2.0, 2.0)
    datasets[0].uneven = True
    for view in range(22):
        list(auto.epoch(plan_of(96), view))
    assert len(lines) == 1


def test_an_epoch_that_is_left_early_does_not_confuse_it(pair):
    auto, _, _ = pair(2.0, 1.0)
    for view in range(FIRST + EVERY):
        batches = auto.epoch(plan_of(96), view % 200)
        first = [next(batches).ids for _ in range(5)]
        batches.close()
        assert torch.equal(torch.cat(first), plan_of(96).ids[:40])


def test_unreadable_images_are_counted_once():
    loaders = [LocalLoader(Numbers(24, frozenset({3})), 8, 1, 0, 1, workers=0) for _ in range(2)]
    auto = AutoWorkers(*loaders, print)
    for view in range(40):
        list(auto.epoch(plan_of(24), view))
    assert auto.unreadable == {3}
