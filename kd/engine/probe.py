"""Choose by measurement: run the candidates in turns, take the medians, keep the table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from kd.contracts import Backend

HOPELESS_SECONDS, HOPELESS_RATIO = 0.5, 4.0


def fastest(
    candidates: Mapping[str, Callable[[], torch.Tensor]],
    backend: Backend,
    rounds: int = 3,
    budget_seconds: float = 20.0,
) -> tuple[str, dict[str, float]]:
    """Return the name of the fastest candidate and the median milliseconds of each.

    The candidates are interleaved, so that a noisy neighbour slows them alike; the first round only warms up. A
    candidate that takes over half a second and four times as long as the best drops out. Stops early, after one
    measured round, when the budget is spent. Who races on, and who has won, is what rank 0 measured: the work of a
    candidate may hold collectives (a sharded teacher's does), which all ranks must enter equally often.

    Args:
        candidates: each does the work once and returns a tensor that is waited for.
        backend: for the broadcasts.
        rounds: measured rounds.
        budget_seconds: for the whole probe.
    """
    names = list(candidates)
    if len(names) == 1:
        return names[0], {}
    samples: dict[str, list[float]] = {name: [] for name in names}
    racing = list(names)
    start = time.perf_counter()
    candidates[names[0]]().sum().item()  # pays for what is set up once, whoever comes first
    for turn in range(rounds + 1):
        for name in racing:
            before = time.perf_counter()
            candidates[name]().sum().item()  # waits for the device
            samples[name].append(time.perf_counter() - before)
        best = min(samples[name][-1] for name in racing)
        racing = [name for name in racing if samples[name][-1] < max(HOPELESS_SECONDS, HOPELESS_RATIO * best)]
        spent = turn > 0 and time.perf_counter() - start > budget_seconds
        go_on = torch.tensor([float(name in racing and not spent) for name in names], device=backend.device)
        backend.broadcast_([go_on])
        racing = [name for name, on in zip(names, go_on.tolist(), strict=True) if on]
        if not racing:
            break
    table = {name: 1000 * statistics.median(times[1:] or times) for name, times in samples.items()}
    choice = torch.tensor([names.index(min(table, key=table.__getitem__))], device=backend.device)
    backend.broadcast_([choice])
    return names[int(choice.item())], {name: round(value, 2) for name, value in table.items()}
