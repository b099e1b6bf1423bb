"""The batch, divided over ranks and micro-batches, and the loaders of both splits."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import torch

from kd.config.schema import DataSection
from kd.core.contracts import Backend
from kd.core.errors import ConfigError
from kd.core.host import cores, shared_memory_mib
from kd.data.loader import LocalLoader
from kd.data.views import Views
from kd.data.workers import require_shared_memory

MOST_WORKERS = 32  # worker processes beside an accelerator at most; hosts of eight GPUs have 24 cores for each


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """How the global batch is divided over ranks and micro-batches."""

    batch_size: int
    world_size: int
    micro_batch: int
    accumulate: int
    eval_batch: int

    def __str__(self) -> str:
        if self.world_size == self.accumulate == 1:
            return f"{self.batch_size} images"
        return f"{self.batch_size} images = {self.world_size} ranks x {self.accumulate} micros x {self.micro_batch}"


def split_batch(section: DataSection, world_size: int, num_images: int) -> BatchSplit:
    """Divide the global batch over ranks and micro-batches."""
    batch_size = section.batch_size
    share, rest = divmod(batch_size, world_size)
    micro = section.micro_batch or share
    if rest or not share or share % micro:
        near = max(1, round(batch_size / (world_size * micro or 1))) * world_size * (micro or 1)
        wrong = f"{batch_size} images cannot be divided into {world_size} ranks x micro-batches of {micro}"
        allowed = "batch_size = ranks x micros x micro_batch, all whole"
        raise ConfigError("data.batch_size", wrong, allowed, f"Set data.batch_size={near}, or change data.micro_batch")
    if num_images < batch_size:
        wrong = f"is {batch_size}, but the training split has {num_images} images"
        remedy = f"Set data.batch_size={max(world_size, num_images // world_size * world_size)}"
        raise ConfigError("data.batch_size", wrong, "At most the size of the training split", remedy)
    return BatchSplit(batch_size, world_size, micro, share // micro, section.eval_batch or micro)


def workers_of(section: DataSection, backend: Backend) -> int:
    """Return the number of worker processes of this rank.

    `auto`: on a CPU one, which hides reading, since more would take the step's cores; none on one or two cores. Beside
    an accelerator all of this rank's cores but one, at most `MOST_WORKERS`.
    """
    if section.loader == "ray":
        return 0  # a fork of a process with Ray's threads may never run
    if section.workers != "auto":
        return int(section.workers)
    share = max(1, cores() // backend.local_world_size)
    if backend.device.type == "cpu":
        return 1 if share > 2 else 0
    return max(1, min(MOST_WORKERS, share - 1))


def loaders(
    both: tuple[Views, Views], section: DataSection, split: BatchSplit, backend: Backend, timeout_seconds: float
) -> tuple[LocalLoader, LocalLoader]:
    """Build the training and the validation loader of this rank."""
    if section.loader == "ray":
        return _remote(both, section, split, backend)
    count = workers_of(section, backend)
    train = _local(both[0], split.batch_size, split.accumulate, section, backend, timeout_seconds)
    val = evaluation_loader(both[1], section, split, backend, timeout_seconds)
    # Both at once: an evaluation may take place in the middle of an epoch.
    needed = train.batch_bytes(section.image_size) + val.batch_bytes(section.image_size)
    require_shared_memory(needed * backend.local_world_size, shared_memory_mib(), count)
    return train, val


def _remote(
    both: tuple[Views, Views], section: DataSection, split: BatchSplit, backend: Backend
) -> tuple[LocalLoader, LocalLoader]:
    """Build loaders of one pool of decoders, which rank 0 starts."""
    from kd.cluster.decoders import Pool  # Ray: 1 s of imports, and an extra
    from kd.cluster.remote import RemoteLoader

    token = torch.tensor([secrets.randbelow(2**24)], dtype=torch.float32, device=backend.device)
    pools = [Pool(both, 0, int(token.item()), section.deadline)] if backend.rank == 0 else []
    backend.broadcast_([token])
    pool = pools[0] if pools else Pool(both, backend.rank, int(token.item()), section.deadline)
    rank, ranks, common = backend.rank, backend.world_size, _loading(section, backend)
    train = RemoteLoader(pool, 0, both[0], split.batch_size, split.accumulate, rank, ranks, **common)
    val = RemoteLoader(pool, 1, both[1], split.eval_batch * split.world_size, 1, rank, ranks, **common)
    return train, val


def evaluation_loader(
    shown: Views, section: DataSection, split: BatchSplit, backend: Backend, timeout_seconds: float
) -> LocalLoader:
    """Build a loader of this rank's batches of an evaluation."""
    return _local(shown, split.eval_batch * split.world_size, 1, section, backend, timeout_seconds)


def _local(
    shown: Views, batch_size: int, accumulate: int, section: DataSection, backend: Backend, timeout_seconds: float
) -> LocalLoader:
    rank, ranks, count = backend.rank, backend.world_size, workers_of(section, backend)
    more = {"timeout_seconds": timeout_seconds, **_loading(section, backend)}
    return LocalLoader(shown, batch_size, accumulate, rank, ranks, count, **more)


def _loading(section: DataSection, backend: Backend) -> dict[str, Any]:
    return {"pin_memory": backend.device.type == "cuda", "max_skipped": section.max_skipped}
