"""Steps that are left out, with optimizers that are not fused."""

import math

import torch

from kd.parts.backends._optimizers import copy_before_step, state_tensors


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
