"""A time limit for one iteration of the event loop, so that health checks are answered in time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

SECONDS, READS = 0.02, 8
"""Limits of one iteration: time for parsing, and connections that are parsed. Each may start a request."""


class LoopBudget:
    """A queue for received data: some is parsed in this iteration of the event loop, the rest in later ones.

    asyncio reads every ready connection in one iteration. With 500 connections whose data is slow to parse, an
    iteration takes seconds, and a health check needs about five iterations.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._spent, self._reads, self._scheduled = 0.0, 0, False

    @property
    def free(self) -> bool:
        """Whether a job may run in this iteration."""
        return not self._waiting and self._within()

    def run(self, job: Callable[[], None]) -> None:
        """Run a job now and measure its time."""
        start = time.perf_counter()
        try:
            job()
        finally:
            self._spent += time.perf_counter() - start
            self._reads += 1
            if not self._scheduled:
                self._scheduled = True
                asyncio.get_running_loop().call_soon(self._next)

    def wait(self, job: Callable[[], None]) -> None:
        """Run a job in a later iteration, in first-in-first-out order."""
        self._waiting.append(job)

    def _within(self) -> bool:
        return self._spent < SECONDS and self._reads < READS

    def _next(self) -> None:
        self._spent, self._reads, self._scheduled = 0.0, 0, False
        while self._waiting and self._within():
            self.run(self._waiting.popleft())
