"""Sifters that decide in the plan: exact counts, unbiased, refreshed, equal on all
ranks, resumable.
"""

import hashlib
import itertools
from dataclasses import replace

import pytest
import torch

from kd.core.types import SiftContext
from kd.parts.sifters import history, none, random

IMAGES = 400
BATCH = 20
LABELS = torch.arange(IMAGES) % 4


def sift_context(
    seed: int = 0, rank: int = 0, world_size: int = 1, reduce_sum=lambda tensor: tensor
) -> SiftContext:
    return SiftContext(
        IMAGES,
        BATCH,
        BATCH // world_size,
        rank,
        world_size,
        seed,
        lambda: LABELS,
        reduce_sum,
    )


def losses(seed: int = 0) -> torch.Tensor:
    """Return losses with a long tail, as those of trained models."""
    return torch.rand(IMAGES, generator=torch.Generator().manual_seed(seed)) ** 3 * 4


def warm(
    options: history.Options, seed: int = 0, values: torch.Tensor | None = None
) -> history.History:
    """Return a sifter after a first epoch of all images."""
    sifter = history.build(options, sift_context(seed))
    plan = sifter.plan(0, 0.0)
    values = losses() if values is None else values
    for ids in plan.ids.split(BATCH):
        sifter.observe(ids, values[ids])
    return sifter


@pytest.mark.parametrize("keep", [0.15, 0.3, 0.5, 0.6, 0.75, 0.9, 1.0])
@pytest.mark.parametrize("kind", ["history", "random"])
def test_a_sifted_epoch_has_exactly_the_number_of_images_that_keep_sets(kind, keep):
    if kind == "history":
        sifter = warm(history.Options(keep=keep))
    else:
        sifter = random.build(random.Options(keep=keep), sift_context())
    plan = sifter.plan(1, 0.3)
    assert len(plan.ids) == round(keep * IMAGES / BATCH) * BATCH
    assert abs(len(plan.ids) / IMAGES - keep) <= 0.5 * BATCH / IMAGES + 1e-9
    assert len(plan.ids) % BATCH == 0
    assert len(plan.ids.unique()) == len(plan.ids)
    assert (
        sifter.steps(1, 0.3) == len(plan.ids) // BATCH
    )  # what the length and `--check` are computed from


@pytest.mark.parametrize("views", [2, 3, 30])
def test_the_remainder_is_dropped_per_view(views):
    """410 images in batches of 20: each view drops a fixed set of ten images."""
    context = SiftContext(
        410, BATCH, BATCH, 0, 1, 0, lambda: LABELS, lambda tensor: tensor, views
    )
    plans = [
        none.Everything(context).plan(epoch, 0.0).ids for epoch in range(2 * views)
    ]
    image_sets = [set(ids.tolist()) for ids in plans]
    assert all(
        len(ids) == len(images) == 400
        for ids, images in zip(plans, image_sets, strict=True)
    )
    assert image_sets[:views] == image_sets[views:]
    assert not torch.equal(plans[0], plans[views])  # in another order
    assert set.union(*image_sets[:2]) == set(range(410))
    assert all(first != second for first, second in itertools.pairwise(image_sets))


@pytest.mark.parametrize(
    ("share", "expected", "digests"),
    [
        (0.15, [20, 20, 20], ["f5094e8e01b8", "2297d4a8d3b1"]),
        (0.3, [50, 50, 20], ["d99ce1003bc3", "62aec3313fda"]),
        (0.6, [140, 80, 20], ["1a7c876f0dfe", "198b89ad45e9"]),
    ],
)
def test_a_balanced_epoch_draws_classes_alike_as_far_as_they_go(
    share, expected, digests
):
    """Hashes of the ids of epochs 0 and 3: commit 17adf1c, sifter random with keep,
    balance, no warmup, no anneal.
    """
    labels = torch.tensor([0] * 300 + [1] * 80 + [2] * 20)
    context = replace(SiftContext.alone(labels, batch_size=20), balance=share)
    plans = [none.build(none.Options(), context).plan(epoch, 0.3) for epoch in (0, 3)]
    for plan, digest in zip(plans, digests, strict=True):
        assert torch.bincount(labels[plan.ids], minlength=3).tolist() == expected
        assert len(plan.ids.unique()) == len(plan.ids)
        assert hashlib.sha256(plan.ids.numpy().tobytes()).hexdigest()[:12] == digest
        assert plan.weights.tolist() == [1.0] * len(plan.ids)


def test_whole_epochs_at_the_start_and_at_the_end():
    for sifter in (
        warm(history.Options(keep=0.5, warmup=2)),
        random.Random(random.Options(warmup=2), sift_context()),
    ):
        sizes = [
            len(sifter.plan(epoch, epoch / 16).ids) / IMAGES for epoch in range(16)
        ]
        assert sizes[:2] == [1.0, 1.0]
        assert sizes[14:] == [1.0, 1.0]  # they begin at 0.875 and 0.9375
        assert max(sizes[2:14]) < 0.7


def test_hard_images_are_kept_and_easy_ones_drawn():
    plan = warm(history.Options(keep=0.6)).plan(1, 0.3)
    hard = (losses() >= losses().mean()).nonzero()[:, 0]
    assert torch.isin(hard, plan.ids).all()
    assert len(hard) < len(plan.ids) < IMAGES
    assert (plan.weights == 1).all()


def test_exactly_the_images_below_the_mean_may_be_left_out():
    values = torch.tensor([0.0] * 100 + [1.0] * 200 + [2.0] * 100)  # their mean is 1
    plans = [
        warm(history.Options(keep=0.9), seed, values).plan(1, 0.3).ids
        for seed in range(40)
    ]
    left_out = {id for ids in plans for id in set(range(IMAGES)) - set(ids.tolist())}
    assert left_out == set(range(100))


@pytest.mark.parametrize("keep", [0.15, 0.2, 0.3])
def test_no_easy_image_is_drawn_less_often_than_floor(keep):
    counts = sum(
        torch.bincount(
            warm(history.Options(keep=keep), seed).plan(1, 0.3).ids, minlength=IMAGES
        )
        for seed in range(200)
    )
    assert (
        counts.min() > 200 * 0.15 - 4 * (200 * 0.15 * 0.85) ** 0.5
    )  # four standard errors


def test_constant_losses_are_drawn_without_preference():
    counts = torch.zeros(IMAGES)
    for seed in range(200):
        counts[
            warm(history.Options(keep=0.5), seed, torch.ones(IMAGES)).plan(1, 0.3).ids
        ] += 1
    assert counts.sum() == 200 * IMAGES / 2
    assert (
        counts - 100
    ).abs().max() < 5 * 50**0.5  # binomial: 200 draws with probability 1/2


@pytest.mark.parametrize(("keep", "refresh", "longest"), [(0.3, 3, 4), (0.15, 1, 7)])
def test_no_image_is_left_out_for_longer_than_refresh(keep, refresh, longest):
    """Where overdue ones do not fit, 60 of 400 an epoch, each is seen in every
    seventh.
    """
    sifter = warm(history.Options(keep=keep, refresh=refresh, floor=0.15, anneal=0.0))
    last = torch.zeros(IMAGES, dtype=torch.int64)
    for epoch in range(1, 40):
        plan = sifter.plan(epoch, epoch / 40)
        last[plan.ids] = epoch
        assert (epoch - last).max() <= longest
        sifter.observe(plan.ids, losses()[plan.ids])


def test_the_state_resumes_in_the_middle_of_an_epoch_and_in_another_world():
    """After a checkpoint, two ranks with half of an epoch each have the table of one
    rank with all of it.
    """
    alone = warm(history.Options(keep=0.5))
    plan = alone.plan(1, 0.2)
    half = len(plan.ids) // 2
    alone.observe(plan.ids[:half], losses(1)[plan.ids[:half]])
    resumed = history.build(history.Options(keep=0.5), sift_context())
    resumed.load_state_dict(alone.state_dict())
    again = resumed.plan(1, 0.2)
    assert torch.equal(again.ids, plan.ids)
    assert torch.equal(again.weights, plan.weights)

    totals: list[torch.Tensor] = []
    ranks = [
        history.build(
            history.Options(keep=0.5),
            sift_context(0, rank, 2, lambda t: totals[0] if totals else t),
        )
        for rank in (0, 1)
    ]
    for sifter in ranks:
        sifter.load_state_dict(alone.state_dict())
        sifter.plan(1, 0.2)
    late = plan.ids[half:]
    for sifter, share in zip(ranks, (late[::2], late[1::2]), strict=True):
        sifter.observe(share, losses(1)[share])
    sums = torch.zeros(2, IMAGES)
    sums[0, late] = losses(1)[late]
    sums[1, late] = 1.0
    totals.append(sums)
    alone.observe(late, losses(1)[late])
    resumed.observe(late, losses(1)[late])
    expected = alone.plan(2, 0.4)
    for sifter in (resumed, *ranks):
        resumed_plan = sifter.plan(2, 0.4)
        assert torch.equal(resumed_plan.ids, expected.ids)
        assert torch.equal(resumed_plan.weights, expected.weights)


def test_plans_differ_between_epochs_and_seeds_and_are_functions_of_them():
    for kind, options in ((none, none.Options()), (random, random.Options())):
        sifter = kind.build(options, sift_context())
        twin = kind.build(options, sift_context())
        assert torch.equal(sifter.plan(3, 0.3).ids, twin.plan(3, 0.3).ids)
        assert not torch.equal(sifter.plan(3, 0.3).ids, sifter.plan(4, 0.4).ids)
        assert not torch.equal(
            sifter.plan(3, 0.3).ids,
            kind.build(options, sift_context(1)).plan(3, 0.3).ids,
        )


@pytest.mark.parametrize("keep", [0.15, 0.5, 0.9])
def test_an_image_whose_loss_is_nan_is_kept(keep):
    values = losses()
    values[[3, 77, 301]] = torch.nan
    for seed in range(20):
        assert torch.isin(
            torch.tensor([3, 77, 301]),
            warm(history.Options(keep=keep), seed, values).plan(1, 0.3).ids,
        ).all()


def test_the_table_holds_the_last_loss():
    sifter = warm(history.Options(warmup=4), values=losses(0))
    epoch_losses = [losses(seed) for seed in range(3)]
    for epoch in (1, 2):
        ids = sifter.plan(epoch, 0.0).ids
        sifter.observe(ids, epoch_losses[epoch][ids])
    sifter.plan(3, 0.0)
    state = sifter.state_dict()
    torch.testing.assert_close(state["loss"], epoch_losses[2])
    assert (state["seen"] == 2).all()


def test_the_easy_images_of_two_epochs_are_drawn_anew():
    sifter = warm(history.Options(keep=0.6, refresh=100, anneal=0.0))
    epochs = []
    for epoch in (1, 2, 3):
        plan = sifter.plan(epoch, epoch / 10)
        epochs.append(frozenset(plan.ids.tolist()))
        sifter.observe(plan.ids, losses()[plan.ids])
    assert len(set(epochs)) == 3


@pytest.mark.parametrize(
    "sizes", [(200, 40, 7, 0, 3), (10, 10, 10, 10), (250,), (1, 249)]
)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_balanced_epoch_takes_as_many_of_each_class_as_it_can(sizes, share):
    """As water fills a vessel: no class has two images more than another one that has
    some left.
    """
    labels = torch.cat([torch.full((size,), label) for label, size in enumerate(sizes)])
    labels = labels[
        torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    ]
    context = replace(SiftContext.alone(labels, batch_size=10), balance=share)
    times_taken = torch.zeros(len(labels))
    for epoch in range(30):
        ids = none.Everything(context).plan(epoch, 0.0).ids
        assert (
            len(ids)
            == len(ids.unique())
            == max(10, round(share * len(labels) / 10) * 10)
        )
        taken_of_class = torch.bincount(labels[ids], minlength=len(sizes))
        left_of_class = torch.tensor(sizes) - taken_of_class
        assert (
            taken_of_class[left_of_class > 0].min()
            if (left_of_class > 0).any()
            else taken_of_class.max()
        ) >= taken_of_class.max() - 1
        times_taken[ids] += 1
    # Other images each epoch, so that more of them are seen than one epoch has.
    assert times_taken.max() > times_taken.min() or share > 0.8
    assert (times_taken > 0).float().mean() > share
