"""Which parameters decay."""

from __future__ import annotations

import pytest
import timm
import torch
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
