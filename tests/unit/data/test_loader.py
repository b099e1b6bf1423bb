"""From a plan to micro-batches: the plan's order, whatever the number of ranks, micros
and workers.
"""

import gc
import itertools
import time
from multiprocessing.process import BaseProcess

import pytest
import torch

from kd.core.errors import DataError
from kd.core.types import Batch, Loading, Plan, Sample
from kd.data.loader import LocalLoader, Share, evaluation_plan
from kd.data.views import MixupCutmix, TrainTransform, Views
from kd.parts.datasets.imagefolder import Options, build

FIELDS = ("ids", "image", "label", "partner_label", "lam", "weight")


class Numbers:
    """A dataset whose image `id` of view `v` shows the colour (id, v, 0)."""

    classes = ("even", "odd")

    def __init__(
        self, length: int, broken: frozenset[int] = frozenset(), refuse: bool = False
    ) -> None:
        self.length = length
        self.broken = broken
        self.refuse = refuse

    def __len__(self) -> int:
        return self.length

    def load(self, id: int, view: int) -> Sample:
        if id in self.broken and self.refuse:
            raise DataError(
                "data.root", f"image {id} cannot be read", "Whole images", "Delete it"
            )
        pixels = torch.tensor([id, view, 0], dtype=torch.uint8).view(3, 1, 1)
        return Sample(pixels, id % 2, id % 2, 1.0, readable=id not in self.broken)


def plan_of(count: int) -> Plan:
    ids = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    return Plan(ids=ids, weights=torch.linspace(0.5, 2.0, count))


def load(
    batch_size=8,
    accumulate=1,
    rank=0,
    world_size=1,
    workers=0,
    dataset=None,
    plan=None,
    view=0,
    start=0,
):
    loader = LocalLoader(
        dataset or Numbers(24), Share(batch_size, accumulate, rank, world_size), workers
    )
    return list(loader.epoch(plan or plan_of(24), view, start))


def same(first: Batch, second: Batch) -> bool:
    equal = all(
        torch.equal(getattr(first, name), getattr(second, name)) for name in FIELDS
    )
    return equal and (first.view, first.unreadable, first.crc) == (
        second.view,
        second.unreadable,
        second.crc,
    )


@pytest.mark.parametrize(
    ("ranks", "micros"), [(1, 1), (1, 4), (2, 2), (4, 1), (2, 1), (8, 1)]
)
def test_a_step_is_the_same_set_of_images_on_any_number_of_ranks(ranks, micros):
    plan = plan_of(24)
    by_rank = [load(8, micros, rank, ranks) for rank in range(ranks)]
    for step in range(3):
        ids = plan.ids[8 * step : 8 * step + 8]
        weights = plan.weights[8 * step : 8 * step + 8]
        # micro i of rank r is number i * ranks + r of the step
        micros_of_step = [
            by_rank[rank][step * micros + micro]
            for micro in range(micros)
            for rank in range(ranks)
        ]
        assert torch.equal(torch.cat([batch.ids for batch in micros_of_step]), ids)
        assert torch.equal(
            torch.cat([batch.weight for batch in micros_of_step]), weights
        )
        assert all(len(batch.ids) == 8 // (ranks * micros) for batch in micros_of_step)


def test_batches_hold_what_the_dataset_gives():
    batch = load(view=5)[0]
    assert torch.equal(batch.image[:, 0, 0, 0].long(), batch.ids)
    assert torch.equal(batch.image[:, 1, 0, 0], torch.full((8,), 5, dtype=torch.uint8))
    assert torch.equal(batch.label, batch.ids % 2)
    assert (batch.ids.dtype, batch.label.dtype, batch.lam.dtype) == (
        torch.int64,
        torch.int64,
        torch.float32,
    )
    assert batch.view == 5


class Slow(Numbers):
    """Waits for each image's bytes, as for a storage far away, and then computes."""

    spent = Loading()

    def load(self, id: int, view: int) -> Sample:
        begin = time.perf_counter()
        time.sleep(0.003)
        self.spent = self.spent.plus(Loading(decoding=time.perf_counter() - begin))
        begin = time.thread_time()
        while time.thread_time() < begin + 0.001:
            pass
        return super().load(id, view)


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_times_separate_reading_from_computing(workers):
    """In worker processes and in this one. A busy machine makes computing longer, not
    waiting shorter.
    """
    loader = LocalLoader(Slow(24), Share(8, 1, 0, 1), workers)
    assert len(list(loader.epoch(plan_of(24), 0))) == 3
    loading = loader.loading
    assert loading.seconds >= 24 * 0.004
    assert 24 * 0.003 <= loading.decoding < loading.seconds - 24 * 0.0009
    assert 24 * 0.001 <= loading.busy <= loading.seconds - 0.5 * 24 * 0.003


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_an_epoch_goes_on_where_it_was_left(start):
    complete = load(8, 2)
    remainder = load(8, 2, start=start)
    assert len(remainder) == len(complete) - 2 * start
    assert all(
        same(a, b) for a, b in zip(complete[2 * start :], remainder, strict=True)
    )


@pytest.mark.parametrize("augment", ["plain", "mixed"])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_what_this_process_gives(photos, workers, augment):
    source = build(Options(root=str(photos)), "train", None)
    mixing = MixupCutmix(0.8, 1.0, 0.7) if augment == "mixed" else None
    policy = "rand-m9-mstd0.5" if augment == "mixed" else ""
    views = Views(
        source,
        TrainTransform(16, 0.35, 0.5, 0.3, policy),
        size=16,
        seed=3,
        mixing=mixing,
    )
    plan = Plan(ids=torch.randperm(36), weights=torch.ones(36))
    here = LocalLoader(views, Share(12, 2, 0, 1), workers=0)
    there = LocalLoader(views, Share(12, 2, 0, 1), workers=workers)
    for epoch in range(2):  # the second epoch meets workers that have drawn before
        torch.manual_seed(epoch)
        expected = list(here.epoch(plan, epoch))
        actual = list(there.epoch(plan, epoch))
        assert len(actual) == 6
        assert all(same(a, b) for a, b in zip(expected, actual, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_have_weight_0_and_are_remembered(workers):
    loader = LocalLoader(Numbers(24, frozenset({3, 20})), Share(8, 1, 0, 1), workers)
    batches = list(loader.epoch(plan_of(24), 0))
    weights = {
        int(id): float(w)
        for b in batches
        for id, w in zip(b.ids, b.weight, strict=True)
    }
    assert (
        {id for id, weight in weights.items() if weight == 0}
        == {3, 20}
        == loader.unreadable
    )
    assert sorted(id for batch in batches for id in batch.unreadable) == [3, 20]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_worker_stays_one_line(workers):
    loader = LocalLoader(
        Numbers(24, frozenset({3}), refuse=True), Share(8, 1, 0, 1), workers
    )
    message = ""
    try:  # not pytest.raises: it keeps the traceback, and with it the workers
        list(loader.epoch(plan_of(24), 0))
    except DataError as error:
        message = f"{error} | {error.remedy}"
    assert (
        message
        == "data.root: image 3 cannot be read. Whole images. Delete it. | Delete it"
    )


@pytest.mark.parametrize(
    ("broken", "share", "limit"),
    [(2, 0.01, 1), (1, 0.0, 1), (6, 0.25, 6), (7, 0.25, 6)],
)
def test_more_skipped_images_than_allowed_end_the_run(broken, share, limit):
    loader = LocalLoader(
        Numbers(24, frozenset(range(broken))), Share(8, 1, 0, 1), 0, max_skipped=share
    )
    if broken <= limit:
        assert len(list(loader.epoch(plan_of(24), 0))) == 3
        return
    with pytest.raises(
        DataError,
        match=rf"^data\.max_skipped: {broken} of 24 images .* At most {limit} ",
    ):
        list(loader.epoch(plan_of(24), 0))


def test_a_rest_is_dropped_and_nothing_is_fine():
    assert [len(b.ids) for b in load(8, plan=plan_of(23))] == [8, 8]
    assert load(8, plan=Plan(torch.zeros(0, dtype=torch.int64), torch.zeros(0))) == []


@pytest.mark.parametrize(("images", "batch"), [(13, 8), (16, 8), (1, 8), (7, 1)])
def test_the_evaluation_plan_holds_each_image_once_and_padding_of_weight_0(
    images, batch
):
    plan = evaluation_plan(images, batch)
    assert len(plan.ids) % batch == 0
    assert len(plan.ids) - images < batch
    assert plan.ids[:images].tolist() == list(range(images))
    assert plan.ids[images:].tolist() == [0] * (len(plan.ids) - images)
    assert plan.weights.tolist() == [1.0] * images + [0.0] * (len(plan.ids) - images)


# the whole epoch; an epoch that is left early
@pytest.mark.parametrize("batches", [4, 1])
def test_a_loader_that_is_dropped_ends_its_workers_at_once(batches):
    """Without the garbage collector: it closes queues before torch tells the workers to
    end, and torch then waits.
    """
    gc.collect()
    gc.disable()
    try:
        loader = LocalLoader(Numbers(32), Share(8, 1, 0, 1), workers=2)
        assert (
            len(list(itertools.islice(loader.epoch(plan_of(32), 0), batches)))
            == batches
        )
        workers = loader.processes()
        assert [worker.exitcode for worker in workers] == [None, None]
        del loader
        assert [worker.exitcode for worker in workers] == [0, 0]
    finally:
        gc.enable()


def test_a_loader_in_a_circle_ends_its_workers_in_order(monkeypatch):
    """The garbage collector may close a queue before torch tells its worker to end;
    torch then waits and kills it.
    """
    killed = []
    monkeypatch.setattr(BaseProcess, "terminate", killed.append)
    loader = LocalLoader(Numbers(32), Share(8, 1, 0, 1), workers=2)
    assert len(list(loader.epoch(plan_of(32), 0))) == 4
    workers = loader.processes()
    loader.circle = loader  # type: ignore[attr-defined]
    del loader
    gc.collect()
    assert not killed
    assert [worker.exitcode for worker in workers] == [0, 0]
