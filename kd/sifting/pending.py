"""The queue of kept samples that do not fill a batch yet."""

from __future__ import annotations

import torch

from kd.sifting.batch import SiftingBatch


class Pending:
    """A first-in, first-out queue of samples, from which batches of one size are taken."""

    def __init__(self) -> None:
        self.parts: list[SiftingBatch] = []

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def add(self, batch: SiftingBatch) -> None:
        """Append samples."""
        if len(batch):
            self.parts.append(batch)

    def put_back(self, batch: SiftingBatch) -> None:
        """Insert samples at the front, in their order."""
        self.parts.insert(0, batch)

    def joined(self) -> SiftingBatch | None:
        """Return all samples as one batch without removing them; None where the queue is empty."""
        if len(self.parts) > 1:
            self.parts = [self.parts[0].join(self.parts[1:])]
        return self.parts[0] if self.parts else None

    def cut(self, size: int) -> SiftingBatch:
        """Remove and return the first `size` samples."""
        whole = self.joined()
        assert whole is not None
        if len(whole) == size:
            self.parts = []
            return whole
        order = torch.arange(len(whole))
        self.parts = [whole.take(order[size:])]
        return whole.take(order[:size])
