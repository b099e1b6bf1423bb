"""Draw images by the ranks of their losses among recent ones.

An image whose loss has percentile u among the recent losses is kept with probability
u**beta (Selective-Backprop, arXiv:1910.00762; the table of kept fractions of Amazon's
smart sifting follows the same rule). If u is uniform, 1 / (1 + beta) of all images are
kept. It is uniform for exchangeable losses of any distribution and any length of
history, because ties are broken at random: otherwise a run with constant losses would
keep almost nothing.

All shapes are static and nothing waits for the device, except a Bernoulli draw, whose
size is random.

Shape legend: B images of a candidate batch, L length of the window, K images kept.
"""

import math

import torch
from torch import Tensor

from kd.core.seeds import seed_from


class LossWindow:
    """The last `length` losses, for comparison with new ones.

    Not handled: losses that fall steeply within one window. They rank too low, so a
    Bernoulli draw keeps less than 1 / (1 + beta). A draw of a fixed size is not
    affected.
    """

    def __init__(self, length: int) -> None:
        self.losses_L = torch.full((length,), math.inf)
        """float32 [L], newest last; infinite in the unfilled part."""
        self.count = torch.zeros((), dtype=torch.int64)
        """Number of losses pushed so far.

        It is a tensor, so that XLA does not compile a graph for each value.
        """

    def percentile(self, losses_B: Tensor, tie_rank_B: Tensor) -> Tensor:
        """Return each loss's percentile among the window and its own batch.

        It is in [0, 1], float64 [B]; float32 on mps. `tie_rank_B` is its rank among
        equal losses (itself included), 0 to 1. NaN counts as infinite. The batch itself
        is included, so the first batch has ranks too and old losses count less.
        """
        losses_B = _clean(losses_B)
        self._move_to(losses_B.device)
        # unfilled entries are infinite and sort last
        ordered = torch.cat([self.losses_L, losses_B]).sort().values
        filled = self.count.clamp(max=len(self.losses_L)) + len(losses_B)
        below_B = torch.searchsorted(ordered, losses_B)
        upto_B = torch.searchsorted(ordered, losses_B, right=True).clamp(max=filled)
        return (below_B + tie_rank_B * (upto_B - below_B)) / filled

    def push(self, losses_B: Tensor) -> None:
        losses_B = _clean(losses_B)
        self._move_to(losses_B.device)
        self.losses_L = torch.cat([self.losses_L, losses_B])[len(losses_B) :]
        self.count = self.count + len(losses_B)

    def probability(
        self, losses_B: Tensor, beta: float, generator: torch.Generator
    ) -> Tensor:
        """Return each image's probability of being kept, [B], and push the losses.

        Ties are broken at random.
        """
        tie_rank_B = torch.rand(len(losses_B), generator=generator, dtype=torch.float64)
        tie_rank_B = tie_rank_B.to(_precision(losses_B.device)).to(
            losses_B.device, non_blocking=True
        )
        probability_B = self.percentile(losses_B, tie_rank_B) ** beta
        self.push(losses_B)
        return probability_B

    def sift(
        self,
        losses_B: Tensor,
        beta: float,
        generator: torch.Generator,
        size: int | None = None,
    ) -> Tensor:
        """Draw the images of a candidate batch to keep, and push the losses.

        `generator` is on the CPU. With `size` exactly `size` images are kept, the same
        number on all ranks; with None each image is drawn independently. Returns
        ascending positions in the batch, int64 [K], on the device of the losses.
        """
        probability_B = self.probability(losses_B, beta, generator)
        if size is None:
            return bernoulli(probability_B, generator)
        return systematic(inclusion(probability_B, size), size, generator)

    def state_dict(self) -> dict[str, Tensor]:
        return {"losses": self.losses_L.clone(), "count": self.count.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the losses of a checkpoint, of a longer window only the newest."""
        losses = state["losses"].to(self.losses_L)
        length = len(self.losses_L)
        empty = torch.full((max(0, length - len(losses)),), math.inf).to(self.losses_L)
        self.losses_L = torch.cat([empty, losses])[-length:]
        self.count = state["count"].to(self.count).clamp(max=len(losses))

    def _move_to(self, device: torch.device) -> None:
        """Move to the device of the losses, to which the model is often moved late."""
        if self.losses_L.device != device:
            self.losses_L = self.losses_L.to(device)
            self.count = self.count.to(device)


def quota(start: int, size: int, beta: float) -> int:
    """Return how many of the next `size` images after `start` images to keep.

    Of all images 1 / (1 + beta) are kept. A fraction of an image is carried to the next
    batch: the sum over batches is the floor of the exact total.
    """
    before = math.floor(start / (1 + beta) + 1e-9)
    return math.floor((start + size) / (1 + beta) + 1e-9) - before


def generator_at(seed: int, rank: int, position: int) -> torch.Generator:
    """Return the CPU generator of the draw at a position, which needs no state."""
    return torch.Generator().manual_seed(seed_from(seed, "sift", rank, position))


def bernoulli(probability_B: Tensor, generator: torch.Generator) -> Tensor:
    """Keep each image with its own probability; return int64 [K].

    K is random, so this waits for the device.
    """
    uniform_B = torch.rand(len(probability_B), generator=generator, dtype=torch.float64)
    return (uniform_B.to(probability_B) < probability_B).nonzero().flatten()


def inclusion(probability_B: Tensor, size: int) -> Tensor:
    """Scale probabilities to inclusion probabilities [B] that sum to `size`.

    The largest ones are capped at 1. The excess is distributed over the others in
    proportion.
    """
    positive_B = probability_B.clamp(min=torch.finfo(probability_B.dtype).tiny)
    ordered, order = positive_B.sort(descending=True)
    tail_sums = ordered.flip(0).cumsum(0).flip(0)
    positions = torch.arange(len(ordered), device=ordered.device)
    # scale of this and all later ones, if all earlier ones are capped
    scale = (size - positions) / tail_sums
    capped = (scale * ordered > 1).long().cumprod(0).sum().clamp(max=len(ordered) - 1)
    # `scale[capped]` would wait for the device
    factor = scale.index_select(0, capped[None])
    scaled = (ordered * factor).clamp(min=0, max=1)
    scaled = torch.where(positions < capped, 1.0, scaled)
    return torch.empty_like(scaled).scatter_(0, order, scaled)


def systematic(inclusion_B: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draw exactly `size` images by systematic sampling, with inclusion probabilities.

    Returns int64 [K], ascending and distinct. Joint probabilities depend on the order
    of the batch, which should therefore be random.
    """
    start = torch.rand((), generator=generator, dtype=torch.float64)
    start = start.to(inclusion_B.device, inclusion_B.dtype, non_blocking=True)
    steps = torch.arange(size, device=inclusion_B.device)
    index = torch.searchsorted(inclusion_B.cumsum(0), start + steps, right=True)
    if not size:
        return index
    # In exact arithmetic the positions are distinct and in range. Rounding may shift a
    # boundary by one image.
    return (index - steps).cummax(0).values.clamp(max=len(inclusion_B) - size) + steps


def _clean(losses_B: Tensor) -> Tensor:
    return (
        losses_B.detach()
        .float()
        .nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    )


def _precision(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
