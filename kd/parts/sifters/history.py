"""Skip images whose last distillation loss was low, before they are decoded."""

import math

import torch
from torch import Tensor

from kd.core.keys import PositiveFraction, keys
from kd.core.types import SiftContext
from kd.parts.sifters._plan import generator
from kd.parts.sifters._table import Limits, Remembering


@keys
class Options(Limits):
    """Share of an epoch to keep, and its limits."""

    floor: PositiveFraction = 0.15
    """Lowest probability of keeping an easy image."""

    def __post_init__(self) -> None:
        if self.keep < self.floor:
            raise ValueError(
                f"keep={self.keep:g} is below floor={self.floor:g}, with which each"
                " easy image is kept"
            )


class History(Remembering):
    """Sift by the last loss of each image.

    Easy images have a loss below the mean, or more if `keep` requires it (InfoBatch's
    rule, arXiv:2303.04947; at equal `keep` the effective sample size is larger than
    with a probability that grows with the loss). Easy images are drawn without
    replacement with one probability p; all others are kept. Each image has weight 1,
    which is biased towards hard images: weights of 1/p cost more accuracy in our study
    (benchmarks/LOG.md).
    """

    def __init__(self, options: Options, context: SiftContext) -> None:
        super().__init__(options, context)
        self.floor = options.floor

    def choose(self, candidates: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the hard images and a draw of the easy ones."""
        easy, hard = self._split(candidates, count)
        draws = generator(self.context, "sift", self.epoch)
        drawn = easy[torch.randperm(len(easy), generator=draws)[: count - len(hard)]]
        return torch.cat([hard, drawn]), torch.ones(count)

    def _split(self, candidates: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Split candidates into easy images to draw from and hard images to keep."""
        num_skipped = len(candidates) - count
        if num_skipped <= 0:
            return candidates[:0], candidates
        loss_K = self.loss_N[candidates]
        order = candidates[self.ascending(loss_K)]
        below_mean = int((loss_K < loss_K.mean()).sum())
        # enough easy images that each keeps a probability of `floor` when num_skipped
        # are skipped
        least = math.ceil(num_skipped / max(1 - self.floor, 1e-9))
        num_easy = min(max(below_mean, least), len(candidates))
        return order[:num_easy], order[num_easy:]


def build(options: Options, context: SiftContext) -> History:
    """Build the history sifter."""
    return History(options, context)
