"""A run that is asked to stop: all ranks learn it in the same step."""

from __future__ import annotations

import time

import torch

from kd.engine.run import Run

SECONDS = 1.0
"""About how long a rank waits before it tells the others. torchrun kills 30 s after its signal."""
MOST = 50
"""Calls between two reductions at most, in case the next calls are slower than the last."""


class Stopping:
    """Ask `run.stop` after each step, or each batch of an evaluation, on all ranks alike.

    A single process asks every time. Several reduce the answer, which waits for the device, about every `SECONDS`. The
    number of calls between two reductions follows from a reduced time, so that it is the same on all ranks.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.agreed = run, False
        self.restart()

    def restart(self) -> None:
        """Reduce at the next call: from here on a call takes another time."""
        self._every, self._calls, self._clock = 1, 0, time.perf_counter()

    def __call__(self) -> bool:
        """Return whether all ranks stop here. All ranks must call it equally often."""
        backend = self.run.backend
        if backend.world_size == 1:
            self.agreed = self.agreed or self.run.stop()
            return self.agreed
        self._calls += 1
        if self.agreed or self._calls < self._every:
            return self.agreed
        seconds = (time.perf_counter() - self._clock) / self._calls
        mine = torch.tensor([float(self.run.stop()), seconds], device=backend.device)
        asked, total = backend.reduce_sum(mine).tolist()
        self.agreed = asked > 0
        self.restart()
        self._every = max(1, min(MOST, int(SECONDS * backend.world_size / max(total, 1e-9))))
        return self.agreed
