"""The original loader: its length, and how to resume it in the middle of an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def length_of(sized: Any) -> int | None:
    """Return `len(sized)`, or None where it has no length."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def batch_size_of(loader: Any) -> int | None:
    """Return the size of the loader's full batches, or None where it is not known."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def samples_of(loader: Any) -> int | None:
    """Return the number of samples of an epoch of this rank, or None where it is not known in advance."""
    batches, size = length_of(loader), batch_size_of(loader)
    batch_sampler = getattr(loader, "batch_sampler", None)
    if batches is None or size is None:
        return None
    if getattr(batch_sampler, "even_batches", False):  # accelerate's per-rank sampler: every batch is full
        return batches * size
    if type(batch_sampler) is not torch.utils.data.BatchSampler:
        return None
    samples = length_of(batch_sampler.sampler)
    return samples if samples is None or not batch_sampler.drop_last else batches * size


def random_state(loader: Any) -> dict[str, Tensor]:
    """Return the states of the generators that determine the order of the next epoch."""
    state = {"torch": torch.get_rng_state()}
    generator = getattr(loader, "generator", None)
    if isinstance(generator, torch.Generator):
        state["loader"] = generator.get_state()
    return state


def resume(loader: Iterable[Any], order: dict[str, Tensor], position: int) -> Iterator[Any]:
    """Repeat the epoch of those random states, and skip its first `position` batches.

    The caller's random state does not change. Not handled: an order drawn from numpy or `random`, and a loader that
    restores its own position (torchdata's StatefulDataLoader), whose state must not be saved separately.
    """
    generator = getattr(loader, "generator", None)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(order["torch"].cpu())
        if "loader" in order and isinstance(generator, torch.Generator):
            generator.set_state(order["loader"].cpu())
        batches = iter(loader)
        for _ in itertools.islice(batches, position):
            pass
    return batches
