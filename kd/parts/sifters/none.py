"""Visit every image once per epoch, in a fresh order."""

from kd.core.facts import NoOptions as Options
from kd.core.types import Plan, SiftContext
from kd.parts.sifters._plan import Planned, full_plan


class Everything(Planned):
    """Keeps all images.

    Not handled: a dataset smaller than one batch, which is refused before the run.
    """

    def plan(self, epoch: int, progress: float) -> Plan:
        """Return all images, in a random order."""
        return full_plan(self.context, epoch)


def build(options: Options, context: SiftContext) -> Everything:
    """Build the sifter that keeps all images."""
    return Everything(context)
