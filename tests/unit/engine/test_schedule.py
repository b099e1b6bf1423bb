"""The learning rate as a function of progress."""

import math

import pytest
import torch

from kd.engine.optim import Schedule


@pytest.mark.parametrize("warmup", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("least", [0.0, 0.1])
def test_the_cosine_follows_its_formula(warmup, least):
    schedule = Schedule(0.5, warmup, least)
    for i in range(101):
        progress = i / 100
        if progress < warmup:
            expected = progress / warmup
        else:
            after = (progress - warmup) / (1 - warmup) if warmup < 1 else 0.0
            expected = least + (1 - least) * 0.5 * (1 + math.cos(math.pi * after))
        assert schedule.factor(progress) == pytest.approx(expected, abs=1e-12)


def test_a_constant_rate_follows_its_warmup():
    schedule = Schedule(1.0, 0.2, 0.0, "constant")
    assert [schedule.factor(p) for p in (0.1, 0.2, 0.7, 1.0)] == [0.5, 1.0, 1.0, 1.0]


def test_apply_sets_every_group_and_has_no_state():
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    bias = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD(
        [{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}], lr=9.0
    )
    schedule = Schedule(0.4, 0.0, 0.0)
    assert (
        schedule.apply(optimizer, 0.9)
        < schedule.apply(optimizer, 0.5)
        == pytest.approx(0.2)
    )
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
        [0.2, 0.2]
    )
