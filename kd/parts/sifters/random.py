"""Visit a new random subset each epoch, the baseline of sifters at equal `keep`."""

import torch
from pydantic import NonNegativeInt

from kd.core.keys import Fraction, Keys, PositiveFraction, keys
from kd.core.types import Plan, SiftContext
from kd.parts.sifters._plan import (
    Planned,
    full_plan,
    generator,
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
    """Draws a uniform subset without replacement in each epoch (RS2, arXiv:2305.18424).

    Each image has weight 1. In arXiv:2403.07854 it is, for distillation, no worse than
    other pruning methods.
    """

    def __init__(self, options: Options, context: SiftContext) -> None:
        super().__init__(context, options)

    def plan(self, epoch: int, progress: float) -> Plan:
        """Return the share `keep` of all images, or all in first and last epochs."""
        if self.is_full(epoch, progress):
            return full_plan(self.context, epoch)
        count = num_selected(self.context, self.keep)
        ids = torch.randperm(
            self.context.num_images, generator=generator(self.context, "subset", epoch)
        )
        return shuffled(self.context, epoch, ids[:count], torch.ones(count))


def build(options: Options, context: SiftContext) -> Random:
    """Build the random baseline."""
    return Random(options, context)
