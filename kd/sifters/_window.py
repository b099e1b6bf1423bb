"""Relative probabilistic sifting: the rank of a loss among the last ones, a probability from it, and a draw.

An image whose loss has percentile u among the recent losses is kept with probability u**beta (Selective-Backprop,
arXiv 1910.00762; Amazon's smart sifting documents the same rule by its table of kept fractions). Where u is uniform,
1 / (1 + beta) of all images are kept. A percentile that counts only what is strictly smaller is not uniform: equal
losses all get the lowest one, and constant losses starve the run. Here each loss takes a uniform place within the span
of its equals, the randomized rank of conformal tests, which is exactly uniform for exchangeable losses of any
distribution and any length of history: ties, constants and the very first batch included.

Everything has static shapes and waits for no device, except a Bernoulli draw, whose size is random.

Shape legend: B images of a candidate batch, L length of the window, K images kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kd.seeds import seed_from


class LossWindow:
    """The last `length` losses, with which new ones are compared.

    Not handled: losses that fall steeply within one window. They rank too low and a Bernoulli draw keeps fewer than
    1 / (1 + beta); a draw of a fixed size is not affected.
    """

    def __init__(self, length: int, device: torch.device | str = "cpu") -> None:
        self.losses_L = torch.full((length,), math.inf, device=device)
        """float32, the newest last; infinite where nothing has been seen yet."""
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        """How many losses were ever pushed; a tensor, so that XLA does not compile anew for every value."""

    def percentile(self, losses_B: Tensor, place_B: Tensor | None = None) -> Tensor:
        """Rank each loss among the window and its own batch.

        The batch takes part so that the very first batch is ranked too, and so that a window of old losses lags less.

        Args:
            losses_B: any float dtype; NaN counts as infinite.
            place_B: where within the span of its equals (itself among them) a loss stands, 0 to 1; None is the
                middle, the mid-rank.

        Returns:
            float64 [B] in [0, 1]; float32 on a device without float64.
        """
        losses_B = _clean(losses_B)
        self._follow(losses_B.device)
        ordered = torch.cat([self.losses_L, losses_B]).sort().values
        known = self.count.clamp(max=len(self.losses_L)) + len(losses_B)  # what is not filled yet sorts last
        below_B = torch.searchsorted(ordered, losses_B)
        upto_B = torch.searchsorted(ordered, losses_B, right=True).clamp(max=known)
        dtype = _precision(losses_B.device)
        place_B = torch.full_like(losses_B, 0.5, dtype=dtype) if place_B is None else place_B.to(dtype)
        return (below_B + place_B * (upto_B - below_B)) / known

    def push(self, losses_B: Tensor) -> None:
        """Remember the losses of a batch; the oldest fall out."""
        losses_B = _clean(losses_B)
        self._follow(losses_B.device)
        self.losses_L = torch.cat([self.losses_L, losses_B])[len(losses_B) :]
        self.count = self.count + len(losses_B)

    def sift(self, losses_B: Tensor, beta: float, generator: torch.Generator, size: int | None = None) -> Tensor:
        """Draw which images of a candidate batch are kept, and remember the losses.

        Args:
            losses_B: one loss an image.
            beta: the higher, the fewer are kept.
            generator: on the CPU; see `generator_at`.
            size: keep exactly so many, which lets all ranks keep equally many; None draws each image by itself.

        Returns:
            int64 [K], ascending positions in the batch, on the device of the losses.
        """
        place_B = torch.rand(len(losses_B), generator=generator, dtype=torch.float64)
        place_B = place_B.to(_precision(losses_B.device)).to(losses_B.device, non_blocking=True)
        probability_B = self.percentile(losses_B, place_B) ** beta
        self.push(losses_B)
        if size is None:
            return bernoulli(probability_B, generator)
        return systematic(inclusion(probability_B, size), size, generator)

    def state_dict(self) -> dict[str, Tensor]:
        return {"losses": self.losses_L.clone(), "count": self.count.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take the losses of a checkpoint; of a longer window only the newest, into a longer one all of them."""
        losses, length = state["losses"].to(self.losses_L), len(self.losses_L)
        empty = torch.full((max(0, length - len(losses)),), math.inf).to(self.losses_L)
        self.losses_L = torch.cat([empty, losses])[-length:]
        self.count = state["count"].to(self.count).clamp(max=len(losses))

    def _follow(self, device: torch.device) -> None:
        """Move to the device of the losses, once: where the model lies is often decided after the window is made."""
        if self.losses_L.device != device:
            self.losses_L, self.count = self.losses_L.to(device), self.count.to(device)


def quota(seen: int, size: int, beta: float) -> int:
    """Return how many of the next `size` images to keep after `seen` of them, so that 1 / (1 + beta) is kept overall.

    What a batch cannot keep of a fraction of an image goes to the next one: the sum over any batches is the floor of
    the whole.
    """
    return math.floor((seen + size) / (1 + beta) + 1e-9) - math.floor(seen / (1 + beta) + 1e-9)


def generator_at(seed: int, rank: int, position: int) -> torch.Generator:
    """Return the CPU generator of one draw, a function of its place in the run: nothing random has to be saved."""
    return torch.Generator().manual_seed(seed_from(seed, "sift", rank, position))


def bernoulli(probability_B: Tensor, generator: torch.Generator) -> Tensor:
    """Keep each image with its own probability; int64 [K], of random length: waits for the device."""
    uniform_B = torch.rand(len(probability_B), generator=generator, dtype=torch.float64).to(probability_B)
    return (uniform_B < probability_B).nonzero().flatten()


def inclusion(probability_B: Tensor, size: int) -> Tensor:
    """Scale probabilities to inclusion probabilities [B] that sum to `size`, each at most 1.

    The largest ones are capped at 1 and what they cannot take is shared by the others in proportion.
    """
    ordered, order = probability_B.clamp(min=torch.finfo(probability_B.dtype).tiny).sort(descending=True)
    rest = ordered.flip(0).cumsum(0).flip(0)
    places = torch.arange(len(ordered), device=ordered.device)
    scale = (size - places) / rest  # of all from here on, if everything before is capped
    capped = (scale * ordered > 1).long().cumprod(0).sum().clamp(max=len(ordered) - 1)
    scaled = torch.where(places < capped, 1.0, (ordered * scale[capped]).clamp(min=0, max=1))
    return torch.empty_like(scaled).scatter_(0, order, scaled)


def systematic(inclusion_B: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draw exactly `size` images with the given inclusion probabilities: systematic sampling, one random number.

    Which images go together depends on their order in the batch, so the batch should come shuffled.

    Returns:
        int64 [K], ascending and distinct.
    """
    device = inclusion_B.device
    start = torch.rand((), generator=generator, dtype=torch.float64).to(inclusion_B)
    places = torch.arange(size, device=device)
    found = torch.searchsorted(inclusion_B.cumsum(0), start + places, right=True)
    # In exact arithmetic these are distinct and in range; rounding may shift a boundary by one image.
    return (found - places).cummax(0).values.clamp(max=len(inclusion_B) - size) + places if size else found


def _clean(losses_B: Tensor) -> Tensor:
    return losses_B.detach().float().nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)


def _precision(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
