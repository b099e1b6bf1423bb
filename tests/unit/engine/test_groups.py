"""Which parameters decay."""

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from torch import nn

from kd.engine.optim import groups


def names_of(network: nn.Module, group: dict) -> set[str]:
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    return {names[id(parameter)] for parameter in group["params"]}


def test_parameters_of_several_modules_are_grouped_without_frozen_ones():
    first = nn.Linear(2, 3)
    second = nn.Linear(3, 4)
    second.weight.requires_grad_(False)
    decayed, undecayed = groups([first, second], 0.1)
    assert decayed["params"] == [first.weight]
    assert [id(p) for p in undecayed["params"]] == [id(first.bias), id(second.bias)]


@pytest.mark.parametrize("module", [nn.Linear(2, 3, bias=False), nn.LayerNorm(4)])
def test_an_empty_group_is_left_out(module):
    assert len(groups([module], 0.1)) == 1


@pytest.mark.parametrize(
    "model",
    [
        "xcit_nano_12_p16_224",
        "deit_tiny_distilled_patch16_224",
        "resnet10t",
        "swin_tiny_patch4_window7_224",
    ],
)
def test_parameters_without_decay_equal_timms(model):
    """XCiT names a pattern, `pos_embed.*`: its position embedding is a convolution with
    weights of four dimensions.
    """
    with torch.device("meta"):
        network = timm.create_model(model)
    timms = param_groups_weight_decay(
        network, 0.05, no_weight_decay_list=getattr(network, "no_weight_decay", set)()
    )
    expected = {group["weight_decay"]: names_of(network, group) for group in timms}
    assert {
        group["weight_decay"]: names_of(network, group)
        for group in groups([network], 0.05)
    } == expected
