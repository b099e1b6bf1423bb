"""Which parameters decay."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from torch import nn

from kd.engine.optim import groups


def names_of(network: nn.Module, group: dict) -> set[str]:
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    return {names[id(parameter)] for parameter in group["params"]}


def test_matrices_decay_and_vectors_tokens_and_positions_do_not():
    network = timm.create_model(
        "deit_tiny_distilled_patch16_224", img_size=16, patch_size=8, embed_dim=24, depth=1, num_heads=2, num_classes=3
    )
    decayed, kept = groups([network], 0.05)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.05, 0.0)
    assert names_of(network, decayed) == {
        "patch_embed.proj.weight",
        "blocks.0.attn.qkv.weight",
        "blocks.0.attn.proj.weight",
        "blocks.0.mlp.fc1.weight",
        "blocks.0.mlp.fc2.weight",
        "head.weight",
        "head_dist.weight",
    }
    assert {"cls_token", "dist_token", "pos_embed", "norm.weight", "head.bias"} <= names_of(network, kept)
    assert names_of(network, decayed) | names_of(network, kept) == {name for name, _ in network.named_parameters()}
    assert not names_of(network, decayed) & names_of(network, kept)


def test_several_modules_and_frozen_parameters():
    one, other = nn.Linear(2, 3), nn.Linear(3, 4)
    other.weight.requires_grad_(False)
    decayed, kept = groups([one, other], 0.1)
    assert decayed["params"] == [one.weight]
    assert [id(p) for p in kept["params"]] == [id(one.bias), id(other.bias)]


@pytest.mark.parametrize("module", [nn.Linear(2, 3, bias=False), nn.LayerNorm(4)])
def test_an_empty_group_is_left_out(module):
    assert len(groups([module], 0.1)) == 1


def test_decay_changes_only_the_decayed_group():
    network = nn.Linear(4, 4)
    nn.init.ones_(network.bias)
    before = network.weight.detach().clone()
    optimizer = torch.optim.AdamW(groups([network], 0.5), lr=0.1)
    network(torch.zeros(1, 4)).sum().mul(0).backward()  # gradients of zero: only decay changes weights
    optimizer.step()
    torch.testing.assert_close(network.weight.detach(), before * 0.95)
    assert torch.equal(network.bias, torch.ones(4))


@pytest.mark.parametrize(
    "model", ["xcit_nano_12_p16_224", "vit_tiny_patch16_224", "resnet10t", "swin_tiny_patch4_window7_224"]
)
def test_what_does_not_decay_is_what_timm_says(model):
    """XCiT names a pattern, `pos_embed.*`: its position embedding is a convolution with weights of four dimensions."""
    with torch.device("meta"):
        network = timm.create_model(model)
    timms = param_groups_weight_decay(network, 0.05, no_weight_decay_list=getattr(network, "no_weight_decay", set)())
    expected = {group["weight_decay"]: names_of(network, group) for group in timms}
    assert {group["weight_decay"]: names_of(network, group) for group in groups([network], 0.05)} == expected
