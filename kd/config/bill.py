"""Turn time on rented machines into dollars, speed-up and saving."""

from typing import NamedTuple


class Bill(NamedTuple):
    """Time of some work on rented machines.

    Cost = price per hour x machines x hours, as SageMaker computes. For a comparison
    the time may have another unit, and `machines` may count GPUs.
    """

    hours: float
    per_hour: float  # US dollars for a machine; 0: not known
    machines: int = 1

    @property
    def usd(self) -> float:
        """US dollars; 0 if the price is not known."""
        return self.hours * self.per_hour * self.machines

    def speed_up(self, before: "Bill") -> float:
        """Return how many times as fast as `before` the same work is."""
        return before.hours / self.hours

    def saving(self, before: "Bill") -> float | None:
        """Return the saved share of the cost of `before`; below 0: it costs more.

        None if a cost is not known.
        """
        if not (self.usd and before.usd):
            return None
        return 1 - self.usd / before.usd
