"""Shared by the backends: an optimizer's parameters and state, and steps whose gradient norm is not finite.

Such a step changes neither weights nor state. The device decides, so that the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of the state, such as AdamW's averages."""
    values = [value for entries in optimizer.state.values() for value in entries.values()]
    return [value for value in values if isinstance(value, Tensor)]


def mib(tensors: Iterable[Tensor]) -> float:
    """Return the memory of tensors, in MiB."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20


def set_group_options(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Set the options of each parameter group, such as the learning rate, to those of saved groups."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def skip_fused_unless_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Let torch's fused kernels leave weights and state alone in this step if `norm` is not finite.

    The kernels read the attribute `found_inf`, which torch sets for its GradScaler only. There is no public way to it;
    it has run with torch 2.4.1, 2.9.1 and 2.15.
    """
    if not optimizer.state:  # a first step that is left out would leave SGD's new buffers unwritten
        for group in optimizer.param_groups:
            for parameter in group["params"] if group.get("momentum") else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]


def copy_before_step(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    """Copy weights and state; the returned function restores them after a step if the norm is not finite.

    A compiler makes one kernel of the update and the choice. State that is made in this step becomes 0, as it begins.
    """
    before = {id(tensor): tensor.detach().clone() for tensor in _tensors(optimizer)}

    @torch.no_grad()
    def restore_unless_finite(norm: Tensor) -> None:
        finite = norm.isfinite()
        for tensor in _tensors(optimizer):
            if tensor.device == norm.device:  # a step counter on the host would have to wait for the device
                old = before.get(id(tensor))
                tensor.copy_(torch.where(finite, tensor, torch.zeros_like(tensor) if old is None else old))

    return restore_unless_finite


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [*parameters(optimizer), *state_tensors(optimizer)]
