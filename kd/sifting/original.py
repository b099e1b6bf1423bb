"""The original loader has a length, and an order that can be repeated."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sizes(NamedTuple):
    """An epoch of this rank has these numbers of batches and samples; None: unknown."""

    batches: int | None
    samples: int | None
    batch_size: int | None


def sizes_of(loader: Any) -> Sizes:
    """Return a loader's facts before an epoch begins."""
    sampler = getattr(loader, "batch_sampler", None)
    batches = _length_or_none(loader)
    batch_size = getattr(loader, "batch_size", None)
    if batch_size is None:
        batch_size = getattr(sampler, "batch_size", None)
    if not isinstance(batch_size, int):
        return Sizes(batches, None, None)
    if batches is None:
        return Sizes(None, None, batch_size)
    samples = None
    # accelerate's per-rank sampler: every batch is full
    if getattr(sampler, "even_batches", False):
        samples = batches * batch_size
    elif type(sampler) is torch.utils.data.BatchSampler:
        samples = (
            batches * batch_size
            if sampler.drop_last
            else _length_or_none(sampler.sampler)
        )
    return Sizes(batches, samples, batch_size)


def _length_or_none(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def random_state(loader: Any) -> dict[str, Tensor]:
    """Return the generators' states that determine the order of an epoch."""
    states = {"torch": torch.get_rng_state()}
    for name, generator in _generators(loader).items():
        states[name] = generator.get_state()
    return states


def _generators(loader: Any) -> dict[str, torch.Generator]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None)
    generators = {}
    for name, holder in (("loader", loader), ("sampler", sampler)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            generators[name] = generator
    return generators


def restore_order(loader: Any, order: Mapping[str, Tensor]) -> None:
    """Set torch's random state and those of a loader's generators."""
    torch.set_rng_state(order["torch"].cpu())
    for name, generator in _generators(loader).items():
        if name in order:
            generator.set_state(order[name].cpu())


def resume_epoch(
    loader: Iterable[Any], order: dict[str, Tensor], position: int
) -> Iterator[Any]:
    """Repeat the epoch of those random states from batch `position` on.

    The caller's random state does not change.

    Not handled: an order drawn from numpy or `random`, and a loader that restores its
    own position (torchdata's).
    """
    with torch.random.fork_rng(devices=[]):
        restore_order(loader, order)
        batches = iter(loader)
        for _ in itertools.islice(batches, position):
            pass
    return batches
