"""Shard a frozen module with FSDP2: each rank keeps 1/ranks of each tensor and all-gathers one block at a time.

Nothing is pickled and no process group is created: rank 0 broadcasts one tensor at a time in the default group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

SMALLEST_SHARE = 0.005
"""Share of all parameters; smaller blocks are gathered with their parent, since each collective has a fixed cost."""


def shard(module: nn.Module, source: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """Shard a frozen module's parameters over the ranks, in place, and load rank 0's tensors.

    The module is on the meta device; `source` has its parameters and buffers by name. Only the forward gathers, so no
    other method may be called. Not handled: a parameter shared by two blocks.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for unit in [*_units(module), module]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    module.to_empty(device=device)
    with torch.no_grad():
        for name, target in _tensors(module):
            if dist.get_rank() == 0:
                full = source[name].to(device, target.dtype).contiguous()
            else:
                full = torch.empty(target.shape, dtype=target.dtype, device=device)
            dist.broadcast(full, src=0)
            if isinstance(target, DTensor):  # sharded locally, without a second collective
                part = distribute_tensor(full, mesh, target.placements, src_data_rank=None)
                target.to_local().copy_(part.to_local())
            else:
                target.copy_(full)
    return module


def local_tensors(module: nn.Module) -> list[Tensor]:
    """Return this rank's part of a module's parameters and buffers."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for _, tensor in _tensors(module)]


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _units(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a network, inner ones first.

    A block is an element of a ModuleList or Sequential that holds another element of its class, as in transformers
    and convolutional networks. Blocks below SMALLEST_SHARE are not listed.
    """
    smallest = SMALLEST_SHARE * sum(parameter.numel() for parameter in module.parameters())
    units = []
    for container in module.modules():
        if not isinstance(container, (nn.Sequential, nn.ModuleList)):
            continue
        kinds = [type(child) for child in container]
        for child in container:
            size = sum(parameter.numel() for parameter in child.parameters())
            if kinds.count(type(child)) > 1 and size and size >= smallest:
                units.append(child)
    return units[::-1]  # modules() lists outer modules first
