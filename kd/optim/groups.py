"""Which parameters decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def groups(modules: Iterable[nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters into those that decay and those that do not.

    Vectors (biases, norms, layer scales) and what a timm model names in `no_weight_decay` (position embeddings, class
    and register tokens) do not decay.

    Returns:
        Two parameter groups for a torch optimizer; a group without parameters is left out, because
        ZeroRedundancyOptimizer refuses empty ones.
    """
    decayed, kept = [], []
    for module in modules:
        exempt = getattr(module, "no_weight_decay", set)()
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                (kept if parameter.ndim <= 1 or name in exempt else decayed).append(parameter)
    both = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in both if group["params"]]
