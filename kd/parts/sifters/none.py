"""Visit every image once an epoch, in a fresh order."""

from dataclasses import dataclass

from kd.core.types import Plan, SiftContext
from kd.parts.sifters._plan import Planned, full_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """No options."""


class Everything(Planned):
    """Keep all images. Not handled: a dataset smaller than one batch, which is refused before the run starts."""

    def plan(self, epoch: int, progress: float) -> Plan:
        """Return all images, in a random order."""
        return full_plan(self.context, epoch)


def build(options: Options, context: SiftContext) -> Everything:
    """Build the sifter that keeps all images."""
    return Everything(context)
