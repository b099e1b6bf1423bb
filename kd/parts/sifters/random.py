"""Visit a new random subset each epoch: the baseline for other sifters at equal
`keep`.
"""

import torch
from pydantic import NonNegativeInt

from kd.core.keys import Fraction, Keys, PositiveFraction, keys
from kd.core.types import Plan, SiftContext
from kd.parts.sifters._plan import (
    Planned,
    full_plan,
    generator,
    is_full_epoch,
    num_selected,
    shuffled,
)


@keys
class Options(Keys):
    """Share of an epoch to keep."""

    keep: PositiveFraction = 0.6
    """Share of the images that a sifted epoch visits."""
    warmup: NonNegativeInt = 1
    """Number of first epochs that visit all images."""
    anneal: Fraction = 0.125
    """Last share of the run with full epochs."""


class Random(Planned):
    """Repeated random subsets (RS2, arXiv:2305.18424): uniform, without replacement
    within an epoch, weight 1.

    A strong baseline for distillation: in arXiv:2403.07854 it is no worse than other
    pruning methods.
    """

    def __init__(self, options: Options, context: SiftContext) -> None:
        super().__init__(context)
        self.options, self.keep = options, options.keep

    def is_full(self, epoch: int, progress: float) -> bool:
        return is_full_epoch(epoch, progress, self.options)

    def plan(self, epoch: int, progress: float) -> Plan:
        """Return the share `keep` of all images; all images in the first and last
        epochs.
        """
        if self.is_full(epoch, progress):
            return full_plan(self.context, epoch)
        count = num_selected(self.context, self.options.keep)
        ids = torch.randperm(
            self.context.num_images, generator=generator(self.context, "subset", epoch)
        )
        return shuffled(self.context, epoch, ids[:count], torch.ones(count))


def build(options: Options, context: SiftContext) -> Random:
    """Build the random baseline."""
    return Random(options, context)
