"""Named regions of a user's own code: for the timeline, torch.profiler and NVTX."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

active: list[Any] = []
"""The timelines of this process; the last one gets the regions."""


class _Mark:
    """A range in torch.profiler, and in NVTX where CUDA is in use."""

    def __init__(self, name: str) -> None:
        self._record = torch.profiler.record_function(name)
        self._nvtx = torch.cuda.is_initialized()
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)
        self._record.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._record.__exit__(None, None, None)
        if self._nvtx:
            torch.cuda.nvtx.range_pop()


def marked(name: str) -> _Mark | None:
    """Open a profiler and NVTX range if a profiler or CUDA is active, else return None."""
    if torch.autograd._profiler_enabled() or torch.cuda.is_initialized():  # type: ignore[attr-defined]
        return _Mark(name)
    return None


@contextmanager
def region(name: str) -> Iterator[None]:
    """Name a part of your own loop, model or loss: `with kd.region("Forward"):`.

    The name appears in torch.profiler and in NVTX. In a run of kd (`kd-train`, `kd.distill`) the time of the host also
    appears in the rows of the timeline, below `regions`. Regions may be nested; each counts all of its time.

    Only the thread that trains is timed.
    """
    mark, begin = marked(name), time.perf_counter()
    try:
        yield
    finally:
        if mark is not None:
            mark.__exit__(None, None, None)
        if active and threading.current_thread() is threading.main_thread():
            active[-1].add_region(name, time.perf_counter() - begin)
