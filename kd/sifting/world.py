"""What the ranks tell each other, by SUM all-reduces only; all must end an epoch after the same number of batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) outside torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather(values: Sequence[int], device: torch.device) -> Tensor:
    """Return the values of all ranks, int64 [ranks, len(values)]. All ranks must call it."""
    rank, size = rank_and_size()
    on = torch.device("cpu") if dist.get_backend() == "gloo" else device
    table = torch.zeros(size, len(values), dtype=torch.int64, device=on)
    table[rank] = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(table)
    return table.cpu()
