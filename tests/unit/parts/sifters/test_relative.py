"""Relative sifting in the loop: exact counts, equal ranks, teacher outputs reused,
resuming with pending images.
"""

from collections.abc import Iterator

import pytest
import torch
from pieces import slow

from kd.core.types import Batch, Outputs, Plan, SiftContext, TeacherOutputs
from kd.parts.sifters import relative

IMAGES = 120
MICRO = 6
LOSSES = torch.rand(IMAGES, generator=torch.Generator().manual_seed(0))


def sift_context(
    rank: int = 0,
    world_size: int = 1,
    images: int = IMAGES,
    seed: int = 0,
    micro: int = MICRO,
) -> SiftContext:
    return SiftContext(
        images,
        2 * micro,
        micro,
        rank,
        world_size,
        seed,
        lambda: torch.zeros(images),
        lambda t: t,
    )


class Scores:
    """A `Score` with given losses: those of all ranks, in the plan's order."""

    def __init__(self, plan: Plan, losses: torch.Tensor = LOSSES) -> None:
        self.plan = plan
        self.losses = losses

    def __call__(self, batches, shrink=1):
        batch = 2 * len(batches[0].ids)
        ids = self.plan.ids[(self.at - 1) * batch : self.at * batch]
        scored = [
            Batch(
                **fields(batch),
                teacher_outputs=TeacherOutputs(Outputs(batch.ids[:, None].float())),
            )
            for batch in batches
        ]
        return self.losses[ids], scored

    def cut(self) -> None:
        pass

    def loaded(self, place: SiftContext, first: int) -> Iterator[Batch]:
        """Yield this rank's chunks; `at` counts the candidate steps that were
        started.
        """
        micro = place.micro_batch
        for step in range(first, len(self.plan.ids) // (2 * micro)):
            self.at = step + 1
            for i in range(2 // place.world_size):
                begin = (2 * step + i * place.world_size + place.rank) * micro
                ids = self.plan.ids[begin : begin + micro]
                yield Batch.of(
                    torch.zeros(micro, 3, 1, 1),
                    torch.zeros(micro, dtype=torch.int64),
                    ids,
                )


def fields(batch: Batch) -> dict:
    return {
        name: getattr(batch, name)
        for name in ("ids", "image", "label", "partner_label", "lam", "weight")
    }


def relative_sifter(beta: float = 1.0, delay: int = 0, **changes) -> relative.Relative:
    options = relative.Options(
        beta_value=beta, sift_delay=delay, loss_history_length=64
    )
    return relative.build(options, sift_context(**changes))


def epoch(
    sifter, number: int = 0, start: int = 0, losses: torch.Tensor = LOSSES
) -> list[Batch]:
    plan = sifter.plan(number, 0.0)
    first = sifter.first(start)
    scores = Scores(plan, losses)
    return list(sifter.stream(scores.loaded(sifter.context, first), scores, start))


@pytest.mark.parametrize(
    ("beta", "kind"),
    [
        *((beta, "spread") for beta in (0.1, 0.5, 3.0, 9.0)),
        (9.0, "constant"),
        (0.1, "two values"),
    ]
    + [slow(beta, kind) for beta in (0.5, 3.0) for kind in ("constant", "two values")],
)
def test_keep_is_exact_for_any_losses(beta, kind):
    images = 12000
    losses = {
        "spread": torch.rand(images),
        "constant": torch.ones(images),
        "two values": torch.arange(images) % 2.0,
    }
    sifter = relative_sifter(beta, images=images, micro=6)
    batches = epoch(sifter, losses=losses[kind].float())
    trained = sum(len(batch.ids) for batch in batches)
    assert trained / images == pytest.approx(1 / (1 + beta), rel=0.01)
    assert len(batches) == 2 * sifter.plan(0, 0.0).steps
    assert {len(batch.ids) for batch in batches} == {6}
    assert len(torch.cat([batch.ids for batch in batches]).unique()) == trained


def test_an_epoch_of_one_candidate_step_keeps_it():
    assert relative_sifter(images=2 * MICRO).steps(0, 0.0) == 1


def test_an_epoch_keeps_at_least_one_step():
    sifter = relative_sifter(beta=50.0)
    assert [sifter.plan(number, 0.0).steps for number in range(3)] == [1, 1, 1]
    assert len(epoch(sifter, number=3)) == 2  # micro-batches of one step
    delayed = relative_sifter(beta=50.0, delay=4)
    assert [delayed.plan(number, 0.0).steps for number in range(3)] == [4, 1, 1]


@pytest.mark.parametrize(
    ("beta", "steps"), [(0.5, [11, 11, 12, 11, 11, 12]), (1.0, [8, 9, 8, 9, 8, 9])]
)
def test_a_fraction_of_a_step_is_carried_to_the_next_epoch(beta, steps):
    """17 candidate steps: without it 11 of 17 are 64.7 %, where 1 / (1 + 0.5) is 66.7
    %.
    """
    sifter = relative_sifter(beta, images=17 * 2 * MICRO + 5)
    assert [sifter.plan(number, 0.0).steps for number in range(6)] == steps
    losses = torch.rand(17 * 2 * MICRO + 5, generator=torch.Generator().manual_seed(1))
    sizes = [
        sum(len(batch.ids) for batch in epoch(sifter, number, losses=losses))
        for number in range(6)
    ]
    assert sizes == [2 * MICRO * count for count in steps]
    assert sum(sizes) / (6 * 17 * 2 * MICRO) == pytest.approx(1 / (1 + beta))


def test_high_losses_are_kept_more_often():
    times_kept = torch.zeros(IMAGES)
    for seed in range(60):
        times_kept[
            torch.cat([batch.ids for batch in epoch(relative_sifter(1.0, seed=seed))])
        ] += 1
    hard = LOSSES.argsort(descending=True)
    assert times_kept[hard[:40]].mean() > 1.8 * times_kept[hard[-40:]].mean()


def test_two_ranks_keep_what_one_keeps():
    alone = epoch(relative_sifter(0.5))
    ranks = [epoch(relative_sifter(0.5, rank=rank, world_size=2)) for rank in (0, 1)]
    assert len(ranks[0]) == len(ranks[1]) == len(alone) // 2
    for step in range(len(ranks[0])):
        expected = [batch.ids.tolist() for batch in alone[2 * step : 2 * step + 2]]
        assert expected == [ranks[0][step].ids.tolist(), ranks[1][step].ids.tolist()]


@pytest.mark.parametrize("beta", [0.5, 0.7, 3.0])
def test_a_resumed_epoch_continues_with_the_pending_images(beta):
    uninterrupted = relative_sifter(beta)
    batches = epoch(uninterrupted)
    steps = len(batches) // 2
    for stop in range(1, steps):
        before = relative_sifter(beta)
        plan = before.plan(0, 0.0)
        scores = Scores(plan)
        stream = before.stream(scores.loaded(before.context, 0), scores, 0)
        for _ in range(2 * stop):
            next(stream)
        resumed = relative_sifter(beta)
        resumed.load_state_dict(before.state_dict())
        remaining = epoch(resumed, start=stop)
        assert [b.ids.tolist() for b in remaining] == [
            b.ids.tolist() for b in batches[2 * stop :]
        ], stop
        assert torch.equal(
            *(
                sifter.state_dict()["window.losses"]
                for sifter in (resumed, uninterrupted)
            )
        )


def test_the_delay_sees_everything_once_or_in_each_epoch():
    once = relative_sifter(1.0, delay=4)
    assert [once.plan(e, 0.0).steps for e in range(3)] == [4 + 3, 5, 5]
    each = relative.build(
        relative.Options(beta_value=1.0, sift_delay=4, repeat_delay_per_epoch=True),
        sift_context(),
    )
    assert [each.plan(e, 0.0).steps for e in range(3)] == [7, 7, 7]
    long = relative_sifter(1.0, delay=15)
    assert [long.plan(e, 0.0).steps for e in range(3)] == [10, 5 + 2, 5]
    batches = epoch(relative_sifter(1.0, delay=4))
    assert [batch.teacher_outputs is None for batch in batches] == [True] * 8 + [
        False
    ] * 6


def test_each_epoch_draws_anew():
    """Of equal losses the places in the plan that are kept are the draw itself."""
    sifter = relative_sifter(1.0)
    kept_places = []
    for number in (0, 1):
        plan = sifter.plan(number, 0.0)
        scores = Scores(plan, torch.ones(IMAGES))
        ids = torch.cat(
            [
                batch.ids
                for batch in sifter.stream(scores.loaded(sifter.context, 0), scores, 0)
            ]
        )
        places = plan.ids.argsort()[ids]
        kept_places.append(sorted(places.tolist()))
    assert kept_places[0] != kept_places[1]
