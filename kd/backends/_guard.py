"""A step whose gradient norm is not finite changes nothing. The device decides, so that nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def guard_fused(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Let torch's fused kernels leave weights and state alone in this step if `norm` is not finite.

    They read the attribute `found_inf`, which belongs to torch's GradScaler.
    """
    if not optimizer.state:  # a first step that is left out would leave SGD's new buffers unwritten
        for group in optimizer.param_groups:
            for parameter in group["params"] if group.get("momentum") else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]


def hold(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    """Remember weights and state; the function that is returned puts them back if the norm is not finite.

    A compiler makes one kernel of the update and the choice. State that is made in this step becomes 0, as it begins.
    """
    before = {id(tensor): tensor.detach().clone() for tensor in _tensors(optimizer)}

    @torch.no_grad()
    def settle(norm: Tensor) -> None:
        finite = norm.isfinite()
        for tensor in _tensors(optimizer):
            if tensor.device == norm.device:  # a step counter on the host would have to wait for the device
                old = before.get(id(tensor))
                tensor.copy_(torch.where(finite, tensor, torch.zeros_like(tensor) if old is None else old))

    return settle


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries = [value for named in optimizer.state.values() for value in named.values()]
    return weights + [value for value in entries if isinstance(value, Tensor)]
