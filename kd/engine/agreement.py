"""Whether all ranks hold the same: one small reduction, no objects are sent."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from kd.contracts import Backend

DIGEST = 8
"""Bytes of a hash that are compared; each is sent as a float32, which holds it exactly."""


def agree(backend: Backend, content: str) -> bool:
    """Return whether every rank passed rank 0's text; all ranks must call this, and all get the same answer."""
    if backend.world_size == 1:
        return True
    digest = hashlib.sha256(content.encode()).digest()[:DIGEST]
    own = torch.tensor(list(digest), dtype=torch.float32, device=backend.device)
    first = backend.reduce_sum(own if backend.rank == 0 else torch.zeros_like(own))
    differs = (own != first).any().float()
    return backend.reduce_sum(differs).item() == 0


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Return a CRC-32 of tensors on the CPU: names, shapes, dtypes, bits. About a second for 1 GB."""
    total = 0
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode(), total)
        total = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, total)
    return total
