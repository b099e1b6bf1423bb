"""A limit on how long one turn of the event loop may be, so that health checks are answered in time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

SECONDS, READS = 0.02, 16
"""How long a turn may parse, and how many connections it may serve: each may start a request."""


class Turns:
    """Decides which received data is parsed in this turn of the event loop, and which waits for a later one.

    asyncio reads every ready connection in a turn. With 500 connections that send what is slow to parse a turn takes
    seconds, and a health check needs about five turns.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._spent, self._reads, self._scheduled = 0.0, 0, False

    @property
    def free(self) -> bool:
        """Whether something more may run in this turn."""
        return not self._waiting and self._within()

    def run(self, job: Callable[[], None]) -> None:
        """Run a job now and count its time."""
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
        """Run a job in a later turn; jobs run in the order in which they came."""
        self._waiting.append(job)

    def _within(self) -> bool:
        return self._spent < SECONDS and self._reads < READS

    def _next(self) -> None:
        self._spent, self._reads, self._scheduled = 0.0, 0, False
        while self._waiting and self._within():
            self.run(self._waiting.popleft())
