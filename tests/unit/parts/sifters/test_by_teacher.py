"""The sifter that reads the teacher's stored answers: scores, exact counts, equal
ranks, resumable, nobody starves.
"""

import pytest
import torch
from torch.nn import functional as F

from kd.core.types import SiftContext
from kd.parts.sifters import teacher
from kd.parts.sifters.teacher import ByAnswers, Options

IMAGES = 400
BATCH = 20
VIEWS = 2
CLASSES = 4
LABELS = torch.arange(IMAGES) % CLASSES
LOGITS = 2 * torch.randn(
    VIEWS, IMAGES, CLASSES, generator=torch.Generator().manual_seed(0)
)
CHOICES = ["hardest", "easiest", "middle", "drawn"]
SCORES = ["loss", "entropy", "margin", "divergence", "learnable"]


class Stored:
    """Answers as a cache stores them; those of `missing` [V, N] are not there."""

    def __init__(self, missing: torch.Tensor | None = None) -> None:
        self.missing = (
            torch.zeros(VIEWS, IMAGES, dtype=torch.bool) if missing is None else missing
        )

    def __call__(self, view, ids):
        return (
            LOGITS[view, ids].where(~self.missing[view, ids, None], 0.0).half(),
            ~self.missing[view, ids],
        )


def sifter_of(
    options: Options,
    stored=None,
    rank: int = 0,
    ranks: int = 1,
    reduce_sum=lambda tensor: tensor,
) -> ByAnswers:
    context = SiftContext(
        IMAGES,
        BATCH,
        BATCH // ranks,
        rank,
        ranks,
        0,
        lambda: LABELS,
        reduce_sum,
        VIEWS,
        0.0,
        stored or Stored(),
    )
    return teacher.build(options, context)


def losses(ids: torch.Tensor) -> torch.Tensor:
    return torch.rand(IMAGES, generator=torch.Generator().manual_seed(1))[ids]


def warm(options: Options, *arguments, **world) -> ByAnswers:
    """Return a sifter after a first epoch of all images."""
    sifter = sifter_of(options, *arguments, **world)
    ids = sifter.plan(0, 0.0).ids
    sifter.observe(ids, losses(ids))
    return sifter


def hardness(score: str, view: int) -> torch.Tensor:
    """The scores by their formulas, from the stored half precision."""
    log = LOGITS.half().float().log_softmax(-1)
    share = log.exp()
    top = share[view].topk(2).values
    loss = F.cross_entropy(LOGITS[view].half().float(), LABELS, reduction="none")
    return {
        "loss": loss,
        "entropy": -(share * log).sum(-1)[view],
        "margin": top[:, 1] - top[:, 0],
        "divergence": (
            F.kl_div(share.mean(0).log(), share[view], reduction="none").sum(-1)
        ),
        "learnable": losses(torch.arange(IMAGES)) - loss,
    }[score]


@pytest.mark.parametrize("score", SCORES)
def test_the_hardest_are_those_of_the_formula_for_the_view_that_is_shown(score):
    sifter = warm(Options(score=score, choose="hardest", keep=0.25))
    for epoch in (1, 2):
        expected = hardness(score, epoch % VIEWS).argsort(descending=True)[:100]
        assert set(sifter.plan(epoch, 0.3).ids.tolist()) == set(expected.tolist())


def test_the_easiest_or_the_middle_images_may_be_chosen():
    by_loss = hardness("loss", 1).argsort()
    for options, expected in (
        (Options(score="loss", choose="easiest", keep=0.25), by_loss[:100]),
        (Options(score="loss", choose="middle", keep=0.25), by_loss[150:250]),
    ):
        plan = warm(options).plan(1, 0.3)
        assert set(plan.ids.tolist()) == set(expected.tolist())
        assert (plan.weights == 1).all()


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("keep", [0.05, 0.3, 0.6, 1.0])
def test_a_sifted_epoch_has_exactly_the_share_and_no_image_twice(choose, keep):
    plan = warm(Options(choose=choose, keep=keep)).plan(1, 0.3)
    assert (
        len(plan.ids) == len(plan.ids.unique()) == round(keep * IMAGES / BATCH) * BATCH
    )


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize(("keep", "refresh", "longest"), [(0.5, 3, 4), (0.15, 1, 7)])
def test_no_image_starves(choose, keep, refresh, longest):
    sifter = warm(Options(choose=choose, keep=keep, refresh=refresh, anneal=0.0))
    last = torch.zeros(IMAGES, dtype=torch.int64)
    for epoch in range(1, 40):
        ids = sifter.plan(epoch, epoch / 40).ids
        last[ids] = epoch
        assert (epoch - last).max() <= longest
        sifter.observe(ids, losses(ids))


def test_images_without_a_stored_output_are_visited():
    """No share is kept of an epoch that fills the cache; later ones skip only what is
    stored.
    """
    stored = Stored(torch.ones(VIEWS, IMAGES, dtype=torch.bool))
    sifter = warm(Options(keep=0.5), stored)
    assert len(sifter.plan(1, 0.1).ids) == IMAGES
    stored.missing[:, 30:] = False
    plan = sifter.plan(2, 0.2)
    assert torch.isin(torch.arange(30), plan.ids).all()
    assert len(plan.ids) == IMAGES / 2
    stored.missing[:, 30:300] = True
    assert (
        len(sifter.plan(4, 0.3).ids) == IMAGES / 2
    )  # an answer that was read is not asked for again


def test_a_draw_favours_the_hard_and_its_weights_undo_that():
    times_drawn = torch.zeros(IMAGES)
    total = torch.zeros(IMAGES)
    sifter = warm(
        Options(
            score="loss",
            choose="drawn",
            keep=0.5,
            reweight=True,
            refresh=10**6,
            anneal=0.0,
        )
    )
    sifter.plan(1, 0.3)
    epochs = range(1, 2001, 2)  # of one view
    for epoch in epochs:
        sifter.epoch = epoch
        plan = sifter._sifted(epoch)
        assert plan.weights.mean() == pytest.approx(1, abs=1e-4)
        times_drawn[plan.ids] += 1
        total[plan.ids] += plan.weights
    order = hardness("loss", 1).argsort()
    quarters = times_drawn[order].view(4, -1).mean(1) / len(epochs)
    assert (quarters.diff() > 0.1).all()
    assert times_drawn.min() > 0
    assert (
        total.std() / total.mean() < 0.15
    )  # each image weighs as much in the long run


@pytest.mark.parametrize("score", ["loss", "divergence", "learnable"])
def test_ranks_choose_the_same_images_and_read_each_output_once(score):
    options = Options(score=score, choose="drawn", keep=0.5)
    reduced = list[torch.Tensor]()
    alone = warm(options)
    state = alone.state_dict()
    expected = alone.plan(1, 0.3)
    nothing = torch.zeros(2, IMAGES)  # the losses of the first epoch are in the state
    for rank in (0, 1):
        sifter = sifter_of(
            options,
            rank=rank,
            ranks=2,
            reduce_sum=lambda tensor: reduced.append(tensor.clone()) or nothing,
        )
        sifter.load_state_dict(state)
        sifter.plan(1, 0.3)
    answered = [tensor for tensor in reduced if tensor.any()]
    assert len(answered) == 2
    assert (answered[0][1] + answered[1][1] == 1).all()
    for rank in (0, 1):
        sums = iter([nothing, answered[0] + answered[1]])
        sifter = sifter_of(
            options, rank=rank, ranks=2, reduce_sum=lambda _, sums=sums: next(sums)
        )
        sifter.load_state_dict(state)
        assert torch.equal(sifter.plan(1, 0.3).ids, expected.ids)


def test_a_resumed_epoch_ignores_outputs_stored_meanwhile():
    stored = Stored(
        torch.rand(VIEWS, IMAGES, generator=torch.Generator().manual_seed(2)) < 0.2
    )
    alone = warm(Options(choose="drawn", keep=0.5), stored)
    plan = alone.plan(1, 0.3)
    state = alone.state_dict()
    resumed = sifter_of(Options(choose="drawn", keep=0.5), Stored())
    resumed.load_state_dict(state)
    again = resumed.plan(1, 0.3)
    assert torch.equal(again.ids, plan.ids)
    assert torch.equal(again.weights, plan.weights)


@pytest.mark.parametrize("score", ["entropy", "divergence"])
def test_outputs_stored_after_the_checkpoint_are_not_known_to_the_resumed_run(score):
    """A run killed while it was evaluated had stored the next epoch's view: that epoch
    was full, and then sifted.
    """

    def plans(sifter: ByAnswers, stored: Stored) -> list[torch.Tensor]:
        chosen = []
        for epoch in range(1, 5):
            chosen.append(sifter.plan(epoch, epoch / 8).ids)
            stored.missing[epoch % VIEWS, chosen[-1]] = False
            sifter.observe(chosen[-1], losses(chosen[-1]))
        return chosen

    stored = Stored(torch.ones(VIEWS, IMAGES, dtype=torch.bool))
    options = Options(score=score, keep=0.5)
    uninterrupted = warm(options, stored)
    state = uninterrupted.state_dict()
    stored.missing[0] = False
    expected = plans(uninterrupted, stored)
    assert [len(ids) for ids in expected] == [
        IMAGES,
        IMAGES / 2,
        IMAGES / 2,
        IMAGES / 2,
    ]
    resumed = sifter_of(options, Stored())
    resumed.load_state_dict(state)
    assert all(map(torch.equal, plans(resumed, Stored()), expected))


def test_weights_need_a_draw():
    with pytest.raises(ValueError, match="reweight=true needs choose=drawn"):
        Options(choose="hardest", reweight=True)


def test_divergence_needs_every_view_of_an_image():
    """Half of the images lack their other view: no mean over views is known of them, so
    they are visited.
    """
    missing = torch.zeros(VIEWS, IMAGES, dtype=torch.bool)
    missing[0, ::2] = True
    sifter = warm(
        Options(score="divergence", choose="hardest", keep=0.5), Stored(missing)
    )
    plan = sifter.plan(1, 0.3)
    assert set(plan.ids.tolist()) == set(range(0, IMAGES, 2))
    assert not sifter.score_VN[1, ::2].isfinite().any()
    assert sifter.score_VN[1, 1::2].isfinite().all()
