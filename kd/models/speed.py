"""CPU milliseconds of calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

ROUNDS = 30
"""Timed calls of each, at most: a median of 30 stands though a third of them met a busy neighbour."""


def cpu_ms(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the CPU milliseconds of each call with one thread, in turns, as medians: 30, or four and `seconds`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        took: dict[str, list[float]] = {name: [] for name in calls}
        begin = time.perf_counter()
        for turn in range(ROUNDS + 2):
            for name, call in calls.items():
                start = time.process_time()
                call()
                if turn >= 2:
                    took[name].append(1000 * (time.process_time() - start))
            if turn > 4 and time.perf_counter() - begin > seconds:
                break
    finally:
        torch.set_num_threads(threads)
    return {name: statistics.median(times) for name, times in took.items()}
