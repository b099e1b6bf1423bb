"""Handle an optimizer's state and non-finite steps for the backends.

A step whose gradient norm is not finite changes neither weights nor state. The device
decides, so the host does not wait.

The state of a sharded optimizer becomes that of an unsharded one, and back, by float32
broadcasts only. ZeRO's own consolidation pickles the state and broadcasts objects:
smddp does not support this, and Neuron compiles it once per length. Its
`load_state_dict` keeps a second copy of the shard and puts AdamW's `step` on the CPU,
where the fused CUDA kernel cannot use it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


def parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = [
        value for entries in optimizer.state.values() for value in entries.values()
    ]
    return [value for value in values if isinstance(value, Tensor)]


def mib(tensors: Iterable[Tensor]) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20


def set_group_options(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]
) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a `state_dict`; its tensors get their parameter's order in memory."""
    # A checkpoint is row-major. A convolution's weight may be channels-last, and
    # torch's fused kernels read parameter, gradient and averages by address.
    optimizer.load_state_dict(state)
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                ordered = torch.empty_like(parameter, dtype=value.dtype)
                entries[name] = ordered.copy_(value)


def skip_fused_unless_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Let torch's fused kernels skip this step if `norm` is not finite."""
    # The kernels read the attribute `found_inf`, which torch sets for its GradScaler
    # only. There is no public way to it; it has run with torch 2.4.1, 2.9.1 and 2.15.
    # a skipped first step would leave SGD's new buffers uninitialized
    if not optimizer.state:
        for group in optimizer.param_groups:
            for parameter in group["params"] if group.get("momentum") else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(
                    parameter
                )
    optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]


def copy_before_step(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    """Copy weights and state for the returned function.

    It restores them after a step if the norm is not finite.
    """

    # A compiler fuses the update and the choice. State created in this step becomes 0,
    # its initial value.
    def changing_tensors() -> list[Tensor]:
        return [*parameters(optimizer), *state_tensors(optimizer)]

    before = {id(tensor): tensor.detach().clone() for tensor in changing_tensors()}

    @torch.no_grad()
    def restore_unless_finite(norm: Tensor) -> None:
        finite = norm.isfinite()
        for tensor in changing_tensors():
            # a step counter on the host would have to wait for the device
            if tensor.device == norm.device:
                old = before.get(id(tensor))
                if old is None:
                    old = torch.zeros_like(tensor)
                tensor.copy_(torch.where(finite, tensor, old))

    return restore_unless_finite


State = dict[int, dict[str, Tensor]]
# base of the two digits that encode a length: float32 is exact only up to 2**24
_BASE = 2**20


def is_divided(optimizer: torch.optim.Optimizer) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Return whether an optimizer is ZeRO's."""
    # without importing its module, which takes 0.9 s (FSDP and SymPy)
    return hasattr(optimizer, "consolidate_state_dict")


def gather(optimizer: ZeroRedundancyOptimizer, device: torch.device) -> dict[str, Any]:
    """Return on rank 0 the `state_dict` of an unsharded optimizer, elsewhere {}."""
    # All ranks must call it. Costs one shard of extra memory on the device.
    rank = dist.get_rank()
    state = _owned_state(optimizer)
    for owner in range(1, dist.get_world_size()):
        header = payload = _empty_vector(0, device)
        if rank == owner:
            header, payload = _pack(state, device)
        digits = [
            *divmod(header.numel(), _BASE),
            *divmod(payload.numel(), _BASE),
        ]
        lengths = torch.tensor(digits, dtype=torch.float32, device=device)
        dist.broadcast(lengths, owner)
        header_high, header_low, payload_high, payload_low = (
            int(digit) for digit in lengths.tolist()
        )
        num_payload = payload_high * _BASE + payload_low
        if not num_payload:
            continue
        if rank != owner:
            header = _empty_vector(header_high * _BASE + header_low, device)
            payload = _empty_vector(num_payload, device)
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
    position = _positions(optimizer)
    local: dict[str, Any] = {"state": {}, "param_groups": []}
    number = 0
    groups = zip(optimizer.optim.param_groups, state["param_groups"], strict=True)
    for group, saved in groups:
        first = number
        for parameter in group["params"]:
            entries = state["state"].get(position[id(parameter)])
            if entries:
                local["state"][number] = entries
            number += 1
        indices = list(range(first, number))
        local["param_groups"].append({**saved, "params": indices})
    load_state(optimizer.optim, local)
    set_group_options(optimizer, state["param_groups"])


def _owned_state(optimizer: ZeroRedundancyOptimizer) -> State:
    """Return the state of this rank's parameters by position in all parameters."""
    # None and bool are not state: muon marks the parameters left to AdamW, and finds
    # them again by shape
    position = _positions(optimizer)
    return {
        position[id(parameter)]: {
            name: torch.as_tensor(value)
            for name, value in entries.items()
            if value is not None and not isinstance(value, bool)
        }
        for parameter, entries in optimizer.optim.state.items()
    }


def _positions(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the positions of an optimizer's parameters by their id."""
    return {
        id(parameter): position
        for position, parameter in enumerate(parameters(optimizer))
    }


def _pack(state: State, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a state as two float32 tensors: a JSON header and the values' raw bits."""
    # The header has one number per byte.
    entries = []
    payloads = [_empty_vector(0, device)]
    for position, values in state.items():
        for name, value in values.items():
            dtype_name = str(value.dtype).removeprefix("torch.")
            entries.append([position, name, dtype_name, list(value.shape)])
            raw = value.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
            padded = torch.nn.functional.pad(raw, (0, -raw.numel() % 4))
            payloads.append(padded.view(torch.float32))
    header = list(json.dumps(entries).encode())
    header_vector = torch.tensor(header, dtype=torch.float32, device=device)
    return header_vector, torch.cat(payloads)


def _unpack(header: Tensor, payload: Tensor) -> State:
    state: State = {}
    start = 0
    for position, name, dtype_name, shape in json.loads(
        bytes(int(number) for number in header.tolist())
    ):
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        end = start + -(-size // 4)
        raw = payload[start:end].clone().view(torch.uint8)[:size]
        state.setdefault(position, {})[name] = raw.clone().view(dtype).reshape(shape)
        start = end
    return state


def _empty_vector(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=device)
