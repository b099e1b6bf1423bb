"""A thousand ranks and a million ids in one process: each id has one owner, all ranks
agree, and work grows linearly.

What is counted is requests, records and bytes, never time. `KD_SOAK=1` takes ten
million ids and prints seconds and MiB. No process group: plans, requests and records
are functions of (seed, epoch, rank).
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator

import pytest
import torch

from kd.core.errors import DataError
from kd.core.types import Plan, Sample, SiftContext
from kd.data.loader import LocalLoader, Request, Share
from kd.models.cache import Codec, Store, open_store
from kd.parts.sifters import history
from kd.parts.sifters._plan import full_plan, num_selected

pytestmark = pytest.mark.slow

SOAK = bool(os.environ.get("KD_SOAK"))
IDS = 10_000_000 if SOAK else 1_000_000
RANKS = 1000
MICRO = 4
GLOBAL = RANKS * MICRO


@pytest.fixture(autouse=True)
def figures(record_property, request) -> Iterator[None]:
    """Add seconds, and by how many MiB the test has raised the peak memory of this
    process, to the test's report.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    record_property("seconds", f"{seconds:.2f}")
    record_property("mib", f"{grown:.0f}")
    if SOAK:
        print(
            f"{request.node.name}: {seconds:.1f} s, {grown:.0f} MiB above the peak of"
            " the tests before"
        )


def context(
    rank: int, count: int = 20 * GLOBAL + 7, batch: int = GLOBAL, ranks: int = RANKS
) -> SiftContext:
    labels = torch.zeros(count, dtype=torch.int64)
    return SiftContext(
        count,
        batch,
        batch // ranks,
        rank,
        ranks,
        0,
        lambda: labels,
        lambda tensor: tensor,
    )


class Ids:
    """A dataset without images: a loader makes its requests, and its first batch is
    refused.
    """

    classes = ("one", "two")

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def load(self, id: int, view: int) -> Sample:
        raise DataError("data.root", f"image {id} is not here")


def requests(
    plan: Plan, batch: int, accumulate: int, rank: int, ranks: int, start: int = 0
) -> list[Request]:
    """Return the requests that a rank's loader makes of a plan; no image is loaded."""
    loader = LocalLoader(
        Ids(len(plan.ids)), Share(batch, accumulate, rank, ranks), workers=0
    )
    with pytest.raises(DataError, match="not here"):
        next(loader.epoch(plan, 0, start))
    return list(loader._requests)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_image_of_a_step_is_on_one_of_a_thousand_ranks(
    accumulate, record_property
):
    batch = GLOBAL * accumulate
    steps = 3
    plan = full_plan(context(0, count=steps * batch, batch=batch), epoch=0)
    by_rank = [requests(plan, batch, accumulate, rank, RANKS) for rank in range(RANKS)]
    for step in range(steps):
        micros = slice(step * accumulate, (step + 1) * accumulate)
        ids = [
            id
            for of_rank in by_rank
            for request in of_rank[micros]
            for id in request.ids
        ]
        assert sorted(ids) == sorted(
            plan.ids[step * batch : (step + 1) * batch].tolist()
        )
    assert {len(of_rank) for of_rank in by_rank} == {steps * accumulate}
    record_property("tried", RANKS * steps)


def test_a_thousand_history_tables_agree(record_property):
    """Each rank observes the images of its own part; the sum over the ranks makes the
    tables and the plans equal.
    """
    count = 2 * GLOBAL + 7
    added = []
    total = torch.zeros(2, count)

    def reduce_sum(mine: torch.Tensor) -> torch.Tensor:
        added.append(int(mine[1].sum()))
        return total.clone()

    def sifter(rank: int) -> history.History:
        table = SiftContext(
            count, GLOBAL, MICRO, rank, RANKS, 0, lambda: torch.zeros(count), reduce_sum
        )
        return history.build(history.Options(keep=0.5), table)

    ranks = [sifter(rank) for rank in range(RANKS)]
    plan = ranks[0].plan(0, 0.0)
    assert all(torch.equal(table.plan(0, 0.0).ids, plan.ids) for table in ranks)
    assert set(added) == {0}
    losses = torch.rand(count, generator=torch.Generator().manual_seed(0))
    for rank, table in enumerate(ranks):
        ids = torch.tensor(
            [
                id
                for request in requests(plan, GLOBAL, 1, rank, RANKS)
                for id in request.ids
            ]
        )
        table.observe(ids, losses[ids])
        total[0, ids] += losses[ids]
        total[1, ids] += 1
    assert total[1].max() == 1
    assert total[1].sum() == len(plan.ids)
    added.clear()
    plans = [table.plan(1, 0.5) for table in ranks]
    assert added == [2 * MICRO] * RANKS  # each rank adds its own images alone
    assert len(plans[0].ids) == num_selected(ranks[0].context, 0.5)
    for later in plans:
        assert torch.equal(plans[0].ids, later.ids)
        assert torch.equal(plans[0].weights, later.weights)
    record_property("tried", RANKS)


def test_ranks_write_records_of_different_ids(tmp_path, record_property):
    """A step of the cache: every rank writes what it was asked for; then nothing is
    missing and nothing was lost.
    """
    codec = Codec(2, "fp32", 0)
    plan = full_plan(context(0, count=GLOBAL), epoch=0)
    for rank in range(RANKS):
        ids = requests(plan, GLOBAL, 1, rank, RANKS)[0].ids
        store = open_store(tmp_path, {"seed": 0}, codec, GLOBAL, writable=True)
        store.write(
            0,
            ids,
            [torch.tensor([[float(id), -float(id)] for id in ids]).numpy()],
            [0] * len(ids),
        )
    store = open_store(tmp_path, {"seed": 0}, codec, GLOBAL, writable=False)
    records, complete = store.read(0, range(GLOBAL))
    assert complete.all()
    assert records["logits"][:, 0].tolist() == list(range(GLOBAL))
    record_property("tried", RANKS)


# --------------------------------------------------------------------------------
# many ids


def test_a_plan_of_all_ids():
    plan = full_plan(context(0, IDS + 7, batch=1000, ranks=1), epoch=1)
    assert len(plan.ids) == IDS
    assert torch.bincount(plan.ids, minlength=IDS + 7).max() == 1
    assert plan.ids.nbytes + plan.weights.nbytes == 12 * IDS


def test_a_history_plan_of_all_ids():
    all_ids = context(0, IDS, batch=1000, ranks=1)
    sifter = history.build(history.Options(keep=0.6), all_ids)
    losses = torch.rand(IDS, generator=torch.Generator().manual_seed(0))
    sifter.observe(sifter.plan(0, 0.0).ids, losses[sifter.plan(0, 0.0).ids])
    plan = sifter.plan(1, 0.5)
    assert len(plan.ids) == num_selected(all_ids, 0.6)
    assert torch.bincount(plan.ids, minlength=IDS).max() == 1
    table = sum(value.nbytes for value in sifter.state_dict().values())
    assert table <= 20 * IDS + 8  # bytes of an id, whatever their number


@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_the_requests_of_one_rank(rank):
    """A rank makes a request a micro-batch of its own; none of the others'."""
    plan = Plan(
        ids=torch.arange(IDS // GLOBAL * GLOBAL),
        weights=torch.ones(IDS // GLOBAL * GLOBAL),
    )
    of_rank = requests(plan, GLOBAL, 1, rank, RANKS)
    assert len(of_rank) == IDS // GLOBAL
    assert sum(len(request.ids) for request in of_rank) == IDS // GLOBAL * MICRO
    assert of_rank[-1].ids[-1] == (len(of_rank) - 1) * GLOBAL + rank * MICRO + MICRO - 1


def test_missing_records_of_a_sparse_cache(tmp_path):
    """A few records among many: the index is a pass over the file, and the file takes
    the blocks of those alone.
    """
    codec = Codec(2, "fp16", 0)
    written = [0, 1, 4095, 4096, IDS // 2, IDS - 1]
    store: Store = open_store(tmp_path, {"seed": 0}, codec, IDS, writable=True)
    store.write(
        0, written, [torch.ones(len(written), 2).half().numpy()], [1] * len(written)
    )
    missing = store.missing(0)
    assert missing.nbytes == 8 * (IDS - len(written))
    assert len(missing) == IDS - len(written)
    assert not set(written) & set(missing[:5000].tolist()) | set(written) & set(
        missing[-5000:].tolist()
    )
    file = next(tmp_path.glob("view_*.logits"))
    assert file.stat().st_blocks * 512 < 64 * 1024 * len(written) < file.stat().st_size
