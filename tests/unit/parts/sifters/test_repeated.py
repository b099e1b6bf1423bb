"""Images that come twice in a batch or an epoch: one entry in the table, the mean of
their losses.
"""

import torch

from kd.core.types import SiftContext
from kd.parts.sifters.history import Options, build


def context(count: int) -> SiftContext:
    return SiftContext(
        count,
        4,
        4,
        0,
        1,
        0,
        lambda: torch.zeros(count, dtype=torch.int64),
        lambda sums: sums,
    )


def test_the_loss_of_an_image_that_came_twice_is_their_mean():
    """In one batch and in two, as if a weighted sampler had drawn it again."""
    sifter = build(Options(), context(8))
    sifter.plan(0, 0.0)
    sifter.observe(torch.tensor([3, 3, 5]), torch.tensor([1.0, 3.0, 7.0]))
    sifter.observe(torch.tensor([3, 0]), torch.tensor([8.0, 0.5]))
    saved = build(Options(), context(8))
    saved.load_state_dict(sifter.state_dict())
    for each in (sifter, saved):
        each.plan(1, 0.5)
        assert each.loss_N[[3, 5, 0]].tolist() == [4.0, 7.0, 0.5]
        assert each.unknown().nonzero()[:, 0].tolist() == [1, 2, 4, 6, 7]
