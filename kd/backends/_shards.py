"""Convert the state of a sharded optimizer to that of an unsharded one and back, by float32 broadcasts only.

ZeroRedundancyOptimizer's consolidation pickles the state and broadcasts objects. smddp does not support this, and
Neuron compiles it once per length. Its `load_state_dict` keeps a second copy of the shard and puts AdamW's `step` on
the CPU, where the fused CUDA kernel cannot use it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

State = dict[int, dict[str, Tensor]]
Broadcast = Callable[[Tensor, int], None]
"""(tensor, source rank): overwrite the tensor in place with that of the source rank."""
_BASE = 2**20


def gather(
    optimizer: ZeroRedundancyOptimizer, rank: int, world_size: int, device: torch.device, broadcast: Broadcast
) -> dict[str, Any]:
    """Return the complete state on rank 0, as the `state_dict` of an unsharded optimizer; elsewhere an empty dict.

    All ranks must call it. Costs one shard of extra memory on the device.
    """
    state = _owned(optimizer)
    for owner in range(1, world_size):
        header, payload = _pack(_owned(optimizer), device) if rank == owner else (_empty(device), _empty(device))
        # float32 is exact for integers up to 2**24 only: a length is sent as two digits of base 2**20
        lengths = [digit for part in (header, payload) for digit in divmod(part.numel(), _BASE)]
        sizes = torch.tensor(lengths, dtype=torch.float32, device=device)
        broadcast(sizes, owner)
        digits = [int(digit) for digit in sizes.tolist()]
        lengths = [digits[0] * _BASE + digits[1], digits[2] * _BASE + digits[3]]
        if rank != owner:
            header, payload = torch.empty(lengths[0], device=device), torch.empty(lengths[1], device=device)
        if lengths[1]:
            broadcast(header, owner)
            broadcast(payload, owner)
        if rank == 0 and lengths[1]:
            state |= _unpack(header, payload)
    if rank != 0:
        return {}
    whole = torch.optim.Optimizer.state_dict(optimizer)
    return {"state": dict(sorted(state.items())), "param_groups": whole["param_groups"]}


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
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def _positions(optimizer: ZeroRedundancyOptimizer) -> dict[int, int]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): position for position, parameter in enumerate(parameters)}


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
    return header, torch.cat(parts) if parts else _empty(device)


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


def _empty(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=device)
