"""Convert the state of a sharded optimizer to that of an unsharded one and back, by float32 broadcasts only.

ZeroRedundancyOptimizer's consolidation pickles the state and broadcasts objects. smddp does not support this, and
Neuron compiles it once per length. Its `load_state_dict` keeps a second copy of the shard and puts AdamW's `step` on
the CPU, where the fused CUDA kernel cannot use it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from kd.backends._optimizers import parameters, set_group_options

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

State = dict[int, dict[str, Tensor]]
_BASE = 2**20


def is_divided(optimizer: torch.optim.Optimizer) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Return whether an optimizer is ZeRO's. Its module loads FSDP and SymPy: 0.9 s that not every command needs."""
    return hasattr(optimizer, "consolidate_state_dict")


def gather(optimizer: ZeroRedundancyOptimizer, device: torch.device) -> dict[str, Any]:
    """Return the complete state on rank 0, as the `state_dict` of an unsharded optimizer; elsewhere an empty dict.

    All ranks must call it. Costs one shard of extra memory on the device.
    """
    rank = dist.get_rank()
    state = _owned(optimizer)
    for owner in range(1, dist.get_world_size()):
        header, payload = _pack(_owned(optimizer), device) if rank == owner else (_empty(0, device), _empty(0, device))
        # float32 is exact for integers up to 2**24 only: a length is sent as two digits of base 2**20
        digits = [digit for part in (header, payload) for digit in divmod(part.numel(), _BASE)]
        lengths = torch.tensor(digits, dtype=torch.float32, device=device)
        dist.broadcast(lengths, owner)
        header_high, header_low, payload_high, payload_low = (int(digit) for digit in lengths.tolist())
        num_payload = payload_high * _BASE + payload_low
        if not num_payload:
            continue
        if rank != owner:
            header, payload = _empty(header_high * _BASE + header_low, device), _empty(num_payload, device)
        dist.broadcast(header, owner)
        dist.broadcast(payload, owner)
        if rank == 0:
            state |= _unpack(header, payload)
    if rank != 0:
        return {}
    # the base class's: ZeroRedundancyOptimizer's own requires its consolidation
    groups = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def scatter(optimizer: ZeroRedundancyOptimizer, state: dict[str, Any]) -> None:
    """Load this rank's share of an unsharded optimizer's state, which any number of ranks may have saved."""
    position = _positions(optimizer)
    local: dict[str, Any] = {"state": {}, "param_groups": []}
    number = 0
    for inner, saved in zip(optimizer.optim.param_groups, state["param_groups"], strict=True):
        indices = []
        for parameter in inner["params"]:
            entries = state["state"].get(position[id(parameter)])
            if entries:
                local["state"][number] = entries
            indices.append(number)
            number += 1
        local["param_groups"].append({**saved, "params": indices})
    optimizer.optim.load_state_dict(local)
    set_group_options(optimizer, state["param_groups"])


def _positions(optimizer: ZeroRedundancyOptimizer) -> dict[int, int]:
    return {id(parameter): position for position, parameter in enumerate(parameters(optimizer))}


def _owned(optimizer: ZeroRedundancyOptimizer) -> State:
    """Return the state of the parameters that this rank updates, by their position in the whole optimizer."""
    position = _positions(optimizer)
    return {
        position[id(parameter)]: {name: torch.as_tensor(value) for name, value in entries.items() if value is not None}
        for parameter, entries in optimizer.optim.state.items()
    }


def _pack(state: State, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a state as two float32 tensors: a JSON header, one number per byte, and the raw bits of the values."""
    entries, parts = [], []
    for position, named in state.items():
        for name, value in named.items():
            entries.append([position, name, str(value.dtype).removeprefix("torch."), list(value.shape)])
            raw = value.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
            parts.append(torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).view(torch.float32))
    header = torch.tensor(list(json.dumps(entries).encode()), dtype=torch.float32, device=device)
    return header, torch.cat(parts) if parts else _empty(0, device)


def _unpack(header: Tensor, payload: Tensor) -> State:
    state: State = {}
    start = 0
    for position, name, dtype_name, shape in json.loads(bytes(int(number) for number in header.tolist())):
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        end = start + -(-size // 4)
        raw = payload[start:end].clone().view(torch.uint8)[:size]
        state.setdefault(position, {})[name] = raw.clone().view(dtype).reshape(shape)
        start = end
    return state


def _empty(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=device)
