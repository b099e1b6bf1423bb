"""Choose by measurement: run the candidates in turns, take the medians, keep the table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from kd.contracts import Backend
from kd.errors import KdError

HOPELESS_SECONDS, HOPELESS_RATIO = 0.5, 4.0


def fastest(
    candidates: Mapping[str, Callable[[], torch.Tensor]],
    backend: Backend,
    rounds: int = 3,
    budget_seconds: float = 20.0,
    margin: float = 0.0,
    warm: bool = False,
) -> tuple[str, dict[str, float]]:
    """Return the name of the fastest candidate and the median milliseconds of each, as rank 0 measured them.

    The candidates are interleaved, so that a noisy neighbour slows them alike; the first round only warms up. A
    candidate that takes over half a second and four times as long as the best drops out. Stops early, after one
    measured round, when the budget is spent. Who races on, and who has won, is what rank 0 measured: the work of a
    candidate may hold collectives (a sharded teacher's does), which all ranks must enter equally often.

    Args:
        candidates: each does the work once and returns a tensor that is waited for.
        backend: for the broadcasts.
        rounds: measured rounds.
        budget_seconds: for the whole probe.
        margin: share of the first candidate's time by which another must be faster to win.
        warm: do each once before the race; what is compiled at its first call would else be hopeless in it.
    """
    names = list(candidates)
    if len(names) == 1:
        return names[0], {}
    samples: dict[str, list[float]] = {name: [] for name in names}
    racing = list(names)
    for name in names if warm else names[:1]:
        candidates[name]().sum().item()  # pays for what is set up once, whoever comes first
    start = time.perf_counter()
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
    medians = torch.tensor([1000 * statistics.median(samples[name][1:] or samples[name]) for name in names])
    medians = medians.to(backend.device)
    backend.broadcast_([medians])
    table = dict(zip(names, medians.tolist(), strict=True))
    winner = min(table, key=table.__getitem__)
    if table[winner] > (1 - margin) * table[names[0]]:
        winner = names[0]
    return winner, {name: round(value, 2) for name, value in table.items()}


def milliseconds(work: Callable[[], torch.Tensor], backend: Backend) -> float:
    """Return how long a piece of work takes, measured once after a warm-up by rank 0."""
    work().sum().item()
    before = time.perf_counter()
    work().sum().item()  # waits for the device
    spent = torch.tensor([1000 * (time.perf_counter() - before)], device=backend.device)
    backend.broadcast_([spent])
    return spent.item()


def attempt(work: Callable[[], torch.Tensor], backend: Backend) -> str:
    """Do a piece of work once; return why it cannot be done on some rank, or "" where all ranks can.

    No collective may lie inside: a rank that fails would leave the others waiting.
    """
    reason = ""
    try:
        work().sum().item()
    except Exception as error:  # compilers, exporters and runtimes fail in their own ways
        reason = in_short(error)
    failed = backend.reduce_sum(torch.tensor([float(bool(reason))], device=backend.device)).item()
    return reason or ("it failed on another rank" if failed else "")


def in_short(error: Exception) -> str:
    """Return what an error says, short enough to stand inside a sentence."""
    if isinstance(error, KdError):
        return error.wrong
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
