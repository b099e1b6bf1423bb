"""Optimizers beyond their plain step: steps that are left out, states that are loaded,
times that are given once.
"""

import math
from functools import partial

import pytest
import torch

from kd.parts.backends import cpu
from kd.parts.backends._optimizers import copy_before_step, load_state, state_tensors


def test_a_first_step_that_is_left_out_leaves_weights_and_an_empty_state():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, foreach=False)
    weight.grad = torch.full((3,), math.nan)
    restore_unless_finite = copy_before_step(optimizer)
    optimizer.step()
    restore_unless_finite(weight.grad.norm())
    assert (weight == 1).all()
    assert state_tensors(optimizer)
    assert all((tensor == 0).all() for tensor in state_tensors(optimizer))


def test_the_waits_of_a_window_are_averaged_and_given_once():
    backend = cpu.build(cpu.Options(threads=torch.get_num_threads()), "fp32", 60.0)
    backend._waits = [2.0, 6.0]  # of two timed steps, ms
    assert backend.communication_ms() == 4.0
    backend._waits.append(1.0)
    assert (
        backend.communication_ms() == 1.0
    )  # the steps before belong to the window before
    assert backend.communication_ms() == 0.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_loaded_state_goes_on_like_one_that_stayed_where_weights_keep_their_channels_last(
    kind, fused
):
    """A checkpoint holds rows in order; fused kernels read weight, gradient and state
    by address.
    """

    def layer() -> torch.nn.Conv2d:
        torch.manual_seed(0)
        return torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)

    def optimizer_of(convolution: torch.nn.Conv2d) -> torch.optim.Optimizer:
        options = {"lr": 0.001, "fused": fused}
        both = {
            "adamw": torch.optim.AdamW,
            "sgd": partial(torch.optim.SGD, momentum=0.9),
        }
        return both[kind](convolution.parameters(), **options)

    def step(
        convolution: torch.nn.Conv2d, optimizer: torch.optim.Optimizer, seed: int
    ) -> None:
        image = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        convolution(image).square().mean().backward()
        optimizer.step()

    stayed = layer()
    first = optimizer_of(stayed)
    step(stayed, first, 1)
    resumed = layer()
    resumed.load_state_dict(stayed.state_dict())
    assert not resumed.weight.is_contiguous()
    second = optimizer_of(resumed)
    saved = first.state_dict()
    rows = {
        key: {
            name: value.clone(memory_format=torch.contiguous_format)
            for name, value in entries.items()
        }
        for key, entries in saved["state"].items()
    }
    load_state(second, {**saved, "state": rows})
    for seed in (2, 3):
        step(stayed, first, seed)
        step(resumed, second, seed)
    assert (stayed.weight - resumed.weight).abs().max() < 1e-6
