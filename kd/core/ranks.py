"""Ranks tell each other numbers by these functions.

All ranks must call them, and all get the same result.
"""

import hashlib
from collections.abc import Sequence

import torch

from kd.core.contracts import Backend


def gather_numbers(backend: Backend, numbers: Sequence[float]) -> list[list[float]]:
    """Return the numbers of every rank as float32, whole ones exact below 2^24.

    All ranks give equally many.
    """
    if backend.world_size == 1:
        return [torch.tensor(list(numbers), dtype=torch.float32).tolist()]
    table = torch.zeros(backend.world_size, len(numbers), device=backend.device)
    table[backend.rank] = torch.tensor(list(numbers))
    return backend.reduce_sum(table).tolist()


def numbers_of_rank_0(backend: Backend, numbers: Sequence[float]) -> list[float]:
    """Return the numbers of rank 0."""
    return gather_numbers(backend, numbers)[0]


def differing_ranks(backend: Backend, content: str) -> list[int]:
    """Return the ranks whose text is not rank 0's."""
    digests = gather_numbers(backend, hashlib.sha256(content.encode()).digest())
    return [rank for rank, digest in enumerate(digests) if digest != digests[0]]
