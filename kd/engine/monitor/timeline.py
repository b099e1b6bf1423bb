"""Timeline: the time of a run by the loop's spans, always recorded.

Each entry into or exit from a span charges the time since the previous one to the
innermost open span. So the parts sum to the wall-clock time, and nested spans are not
counted twice. docs/faster.md explains them.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from kd.core.types import UNKNOWN, Loading, State
from kd.files.storage import append_rows, keep_rows, log

APART = ("evaluation", "checkpoint", "profile", "setup")  # spans outside of steps
SPANS = (
    "data",
    "sifting",
    "teacher",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "wait",
    *APART,
    "other",
)
# warm-up steps of a start: kernels are chosen, allocators and worker queues fill
WARM_UP = 5


@dataclass(slots=True)
class Step:
    """Hold the times of one step by span."""

    host: dict[str, float] = field(default_factory=dict)  # seconds
    device: dict[str, float] = field(default_factory=dict)  # milliseconds
    regions: dict[str, float] = field(default_factory=dict)
    loading: Loading = UNKNOWN
    finished: bool = False

    def ms(self, on_device: bool) -> dict[str, float]:
        if on_device:
            return dict(self.device)
        return {name: 1000 * seconds for name, seconds in self.host.items()}


class DeviceClock:
    """Measure device times by events; the host never waits for them."""

    def __init__(
        self, event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)
    ) -> None:
        """Measure by what `event` makes, such as CUDA's events."""
        self._make_event = event
        self._free = []
        self._open: deque[tuple[Any, str, dict[str, float]]] = deque()

    def mark(self, name: str, times: dict[str, float]) -> None:
        """Charge the device time since the last mark to `times[name]`, at a `read`."""
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        self._open.append((event, name, times))

    def read(self) -> None:
        """Charge the times between marks that the device has passed."""
        while len(self._open) > 1 and self._open[1][0].query():
            begin = self._open.popleft()[0]
            end, name, times = self._open[0]
            times[name] = times.get(name, 0.0) + begin.elapsed_time(end)
            self._free.append(begin)


class Timeline:
    """Time a run by its spans; a context from the set-up to the end of the loop."""

    def __init__(
        self,
        clock: str = "host",
        path: Path | None = None,
        start: int = 0,
        communication: Callable[[], float] = lambda: 0.0,
        device: DeviceClock | None = None,
        on_step: Callable[[int], None] = lambda step: None,
        since: float | None = None,
    ) -> None:
        """Start the clock at `since` (`time.perf_counter`), or now."""
        # `clock`: "host" if the device is the host; "device": device events, by default
        # CUDA's; "tracing": no events tell when work runs. Rows are appended to `path`,
        # if given, after rows beyond step `start` are removed. `communication` returns
        # the mean milliseconds per step, since its last call, that the backward pass
        # waited for gradient reduction. `on_step` gets a step's number before its first
        # span.
        self.clock = clock
        self.path = path
        self.start = start
        self.communication = communication
        self.on_step = on_step
        # milliseconds by span in all rows; device time if it has events
        self.totals: dict[str, float] = {}
        self.finished_steps = 0  # of this start in all rows so far
        # returns the loading time of all batches so far
        self.loading: Callable[[], Loading] = Loading
        self._device = (
            device if device is not None or clock != "device" else DeviceClock()
        )
        self._stack: list[str] = []
        self._setup: Step | None = Step()
        self._now = self._setup
        self._steps: list[Step] = []  # steps of the window, finished or running
        self._window_ended = False
        self._waited = 0.0
        self._loaded = Loading()
        self._last = time.perf_counter() if since is None else since
        if self._device is not None:
            self._device.mark("setup", {})
            self._setup.device["setup"] = 1000 * (time.perf_counter() - self._last)
        if path is not None:
            with suppress(OSError, ValueError):
                keep_rows(path, lambda row: 0 < start >= row["step"])

    def __enter__(self) -> Timeline:
        active.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        active.remove(self)
        self.close()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Charge the time in this block to a span. See `kd.engine.run.Span`."""
        between_steps = self._now is self._setup or self._now.finished
        if name == "data" and between_steps and not self._stack:
            self._next_step()
        else:
            self._charge()
        self._stack.append(name)
        try:
            with profiler_range(name):
                yield
        finally:
            self._charge()
            self._stack.pop()
            if name == "optimizer":
                self._now.finished = True
            elif name == "data":
                # charge the loading time of the batches that arrived in it
                before = self._loaded
                self._loaded = self.loading()
                self._now.loading = self._now.loading.plus(self._loaded.minus(before))

    def _charge(self) -> None:
        now = time.perf_counter()
        outside = "setup" if self._now is self._setup else "other"
        name = self._stack[-1] if self._stack else outside
        times = self._now.host
        times[name] = times.get(name, 0.0) + now - self._last
        self._last = now
        if self._device is not None:
            self._device.mark(name, self._now.device)

    def _read(self) -> None:
        self._charge()
        if self._device is not None:
            self._device.read()

    def _next_step(self) -> None:
        self._read()
        if self._window_ended:
            self._write()
        self._now = Step()
        self._steps.append(self._now)
        self.on_step(self.start + self.finished_steps + len(self._steps))

    def add_region(self, name: str, seconds: float) -> None:
        self._now.regions[name] = self._now.regions.get(name, 0.0) + 1000 * seconds

    def window(self, state: State) -> Mapping[str, float]:
        """End a log window and return its `step_ms`, `data_wait` and `ms_NAME`."""
        self._read()
        self._window_ended = True
        self._waited = self.communication()
        steps = self._finished_times(self._steps)
        if not steps:
            return {}
        sums = summed(steps)
        values = {"step_ms": statistics.median(sum(step.values()) for step in steps)}
        values["data_wait"] = share_of(sums, "data")
        return values | {
            f"ms_{name}": value / len(steps) for name, value in sums.items()
        }

    def _finished_times(self, steps: Sequence[Step]) -> list[dict[str, float]]:
        """Return the times of the finished steps, without time outside of steps."""
        return [
            {name: ms for name, ms in self._times(step).items() if name not in APART}
            for step in steps
            if step.finished
        ]

    def _times(self, step: Step) -> dict[str, float]:
        """Return the milliseconds of a step by span; device time if it has events."""
        # The wait for gradient reduction is subtracted from the backward pass.
        times = step.ms(self._device is not None)
        if self._waited and "backward" in times:
            times["communication"] = min(self._waited, times["backward"])
            times["backward"] -= times["communication"]
        return times

    def _write(self) -> None:
        steps = self._steps
        first = max(0, 1 - self.finished_steps)
        warm = max(0, WARM_UP - self.finished_steps)
        groups = {
            "setup": [self._setup] if self._setup is not None else [],
            "first": steps[:first],
            "warm-up": steps[first:warm],
            "steady": steps[warm:],
        }
        self._setup = None
        self._steps = []
        self._window_ended = False
        end = time.time() - _host_seconds(steps)
        rows = []
        for kind, group in groups.items():
            if group:
                if kind != "setup":
                    end += _host_seconds(group)
                self.finished_steps += sum(step.finished for step in group)
                row = self._row(kind, group, end)
                rows.append(row)
                self.totals = summed([self.totals, row.get("device_ms", row["ms"])])
        try:
            if self.path is not None and rows:
                append_rows(self.path, *rows)
        except OSError as error:  # this must not end the run
            log.warning(
                f"run.folder: the timeline cannot be written ({error}). Training goes"
                " on without it."
            )
            self.path = None

    def _row(self, kind: str, steps: Sequence[Step], end: float) -> dict[str, Any]:
        last = self.start + self.finished_steps
        times = [self._times(step) for step in steps]
        on_host = times if self._device is None else [step.ms(False) for step in steps]
        ms = summed(on_host)
        row: dict[str, Any] = {
            "time": round(end, 3),
            "step": last,
            "steps": sum(step.finished for step in steps),
            "kind": kind,
            "clock": self.clock,
            "wall_ms": round(sum(ms.values()), 3),
            "ms": rounded(ms),
        }
        loading = functools.reduce(Loading.plus, (step.loading for step in steps))
        if loading.seconds:
            row["loading_ms"] = {
                name: round(1000 * value, 3)
                for name, value in loading._asdict().items()
            }
        if self._device is not None:
            row["device_ms"] = rounded(summed(times))
        finished = self._finished_times(steps)
        if finished:
            row |= describe_steps(finished, last - len(finished) + 1)
        if kind == "steady":
            row["each_ms"] = columns(
                [self._times(step) for step in steps if step.finished]
            )
        regions = summed([step.regions for step in steps])
        if regions:
            row["regions"] = rounded(regions)
        return row

    def close(self) -> None:
        """Write the last rows; the last finished step gets the time after it."""
        self._read()
        in_step = self._now is not self._setup and not self._now.finished
        if in_step and len(self._steps) > 1:
            unfinished = self._steps.pop()
            last = self._steps[-1]
            last.host = summed([last.host, unfinished.host])
        if self._steps or self._setup is not None:
            self._write()


def _host_seconds(steps: Sequence[Step]) -> float:
    return sum(sum(step.host.values()) for step in steps)


def summed(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums by name."""
    names = dict.fromkeys(chain(*rows))
    return {name: sum(row.get(name, 0.0) for row in rows) for name in names}


def columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the milliseconds of each step by span, with two decimals."""
    names = dict.fromkeys(chain(*rows))
    return {name: [round(row.get(name, 0.0), 2) for row in rows] for name in names}


def share_of(times: Mapping[str, float], *names: str) -> float:
    """Return the share of the whole time that some spans take."""
    return sum(times.get(name, 0.0) for name in names) / max(sum(times.values()), 1e-9)


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Return milliseconds with three decimals."""
    return {name: round(value, 3) for name, value in values.items()}


def describe_steps(steps: Sequence[Mapping[str, float]], first: int) -> dict[str, Any]:
    """Return the median and the slowest of steps (ms by span) numbered from `first`."""
    # The span of the slowest step is the one that exceeds its own median the most.
    lengths = [sum(step.values()) for step in steps]
    median = statistics.median(lengths)
    names = {name for step in steps for name in step}
    usual = {
        name: statistics.median(step.get(name, 0.0) for step in steps) for name in names
    }
    slowest = max(range(len(steps)), key=lambda i: lengths[i])
    span = max(
        sorted(steps[slowest]), key=lambda name: steps[slowest][name] - usual[name]
    )
    return {
        "median_ms": round(median, 3),
        "slowest": [first + slowest, round(lengths[slowest], 3), span],
    }


active: list[Timeline] = []  # timelines of this process; the last one gets the regions


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Open a range in torch.profiler and NVTX, where they are active, as a context."""
    on_cuda = torch.cuda.is_initialized()
    if not on_cuda and not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return nullcontext()
    ranges = ExitStack()
    ranges.enter_context(torch.profiler.record_function(name))
    if on_cuda:
        ranges.enter_context(torch.cuda.nvtx.range(name))
    return ranges


@contextmanager
def region(name: str) -> Iterator[None]:
    """Name a part of your own loop, model or loss: `with kd.region("Forward"):`.

    The name appears in torch.profiler and in NVTX. In a run of kd (`kd-train`,
    `kd.distill`) its host time also appears in the timeline's rows under `regions`.
    Regions may be nested; each counts its whole time.

    Only the training thread is timed.
    """
    begin = time.perf_counter()
    try:
        with profiler_range(name):
            yield
    finally:
        if active and threading.current_thread() is threading.main_thread():
            active[-1].add_region(name, time.perf_counter() - begin)
