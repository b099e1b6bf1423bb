"""Agreement of the ranks by SUM all-reduces only; all must end an epoch after the same number of batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) outside torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _device(device: torch.device) -> torch.device:
    return torch.device("cpu") if dist.get_backend() == "gloo" else device


def same_everywhere(values: Sequence[int], device: torch.device) -> bool:
    """Return whether all ranks hold the same numbers; the result is the same on all ranks."""
    rank, size = rank_and_size()
    table = torch.zeros(size, len(values), dtype=torch.int64, device=_device(device))
    table[rank] = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(table)
    return bool((table == table[0]).all().item())


def all_ready(ready: bool, device: torch.device) -> bool:
    """Return whether every rank is ready."""
    count = torch.tensor(int(ready), device=_device(device))
    dist.all_reduce(count)
    return int(count.item()) == rank_and_size()[1]
