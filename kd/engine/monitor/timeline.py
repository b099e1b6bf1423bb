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
WARM_UP = (
    5  # warm-up steps of a start: kernels are chosen, allocators and worker queues fill
)


@dataclass(slots=True)
class Step:
    """The times of one step by span: seconds of the host, milliseconds of the
    device.
    """

    host: dict[str, float] = field(default_factory=dict)
    device: dict[str, float] = field(default_factory=dict)
    regions: dict[str, float] = field(default_factory=dict)
    loading: Loading = UNKNOWN
    done: bool = False

    def ms(self, on_device: bool) -> dict[str, float]:
        return (
            dict(self.device)
            if on_device
            else {name: 1000 * seconds for name, seconds in self.host.items()}
        )


class DeviceClock:
    """Device times from events, which are read after the device has passed them. The
    host never waits.
    """

    def __init__(
        self, event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)
    ) -> None:
        """Use `event` to make objects with `record`, `query` and `elapsed_time`
        (milliseconds).
        """
        self._make, self._free = event, []
        self._open: deque[tuple[Any, str, dict[str, float]]] = deque()

    def mark(self, name: str, times: dict[str, float]) -> None:
        """Charge the device time since the last mark to `times[name]`, once the device
        has passed it.
        """
        event = self._free.pop() if self._free else self._make()
        event.record()
        self._open.append((event, name, times))

    def read(self) -> None:
        while len(self._open) > 1 and self._open[1][0].query():
            begin = self._open.popleft()[0]
            end, name, times = self._open[0]
            times[name] = times.get(name, 0.0) + begin.elapsed_time(end)
            self._free.append(begin)


class Timeline:
    """Times a run by its spans. A context from the opened run folder to the end of the
    loop.
    """

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
        """Start the clock: at `since` (`time.perf_counter`), when the set-up began, or
        now.
        """
        # `clock`: "host" if the device is the host; "device": device events, by default
        # CUDA's; "tracing": no events tell when work runs. Rows are appended to `path`,
        # if given, after rows beyond step `start` are removed. `communication` returns
        # the mean milliseconds per step, since its last call, that the backward pass
        # waited for gradient reduction. `on_step` gets a step's number before its first
        # span.
        self.clock, self.path, self.start = clock, path, start
        self.totals: dict[
            str, float
        ] = {}  # milliseconds by span in all rows; device time if it has events
        self.made = 0  # steps of this start in all rows so far
        self.communication, self.on_step = communication, on_step
        self._device = (
            device if device is not None or clock != "device" else DeviceClock()
        )
        self._stack: list[str] = []
        self._setup: Step | None = Step()
        self._now = self._setup
        self._steps: list[Step] = []  # steps of the window, finished or running
        self._ended = False
        self._waited = 0.0
        self.loading: Callable[[], Loading] = (
            Loading  # returns the loading time of all batches so far
        )
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
        """Mark a span: entering and leaving it is a boundary. See
        `kd.engine.run.Span`.
        """
        if (
            name == "data"
            and not self._stack
            and (self._now is self._setup or self._now.done)
        ):
            self._next_step()
        else:
            self._charge()
        self._stack.append(name)
        try:
            with marked(name):
                yield
        finally:
            self._charge()
            self._stack.pop()
            if name == "optimizer":
                self._now.done = True
            elif (
                name == "data"
            ):  # charge the loading time of the batches that arrived in it
                before, self._loaded = self._loaded, self.loading()
                self._now.loading = self._now.loading.plus(self._loaded.minus(before))

    def _charge(self) -> None:
        now, name, times = (
            time.perf_counter(),
            self._stack[-1] if self._stack else "other",
            self._now.host,
        )
        if self._now is self._setup and name == "other":
            name = "setup"
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
        if self._ended:
            self._write()
        self._now = Step()
        self._steps.append(self._now)
        self.on_step(self.start + self.made + len(self._steps))

    def add_region(self, name: str, seconds: float) -> None:
        self._now.regions[name] = self._now.regions.get(name, 0.0) + 1000 * seconds

    def window(self, state: State) -> Mapping[str, float]:
        """End a log window and return the values for its training row: `step_ms`,
        `data_wait`, `ms_NAME`.
        """
        self._read()
        self._ended, self._waited = True, self.communication()
        steps = self._of_steps(self._steps)
        if not steps:
            return {}
        sums = summed(steps)
        values = {"step_ms": statistics.median(sum(step.values()) for step in steps)}
        values["data_wait"] = sums.get("data", 0.0) / max(sum(sums.values()), 1e-9)
        return values | {
            f"ms_{name}": value / len(steps) for name, value in sums.items()
        }

    def _of_steps(self, steps: Sequence[Step]) -> list[dict[str, float]]:
        """Return the times of the steps that are done, without time outside
        of steps.
        """
        return [
            {n: ms for n, ms in self._times(step).items() if n not in APART}
            for step in steps
            if step.done
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
        steps, self._steps, self._ended = self._steps, [], False
        first, warm = max(0, 1 - self.made), max(0, WARM_UP - self.made)
        groups = [("setup", [self._setup] if self._setup is not None else [])]
        groups += [
            ("first", steps[:first]),
            ("warm-up", steps[first:warm]),
            ("steady", steps[warm:]),
        ]
        self._setup = None
        end = time.time() - sum(sum(step.host.values()) for step in steps)
        rows = []
        for kind, group in groups:
            if group:
                end += (
                    sum(sum(step.host.values()) for step in group)
                    if kind != "setup"
                    else 0.0
                )
                self.made += sum(step.done for step in group)
                rows.append(self._row(kind, group, end))
                self.totals = summed(
                    [self.totals, rows[-1].get("device_ms", rows[-1]["ms"])]
                )
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
        last = self.start + self.made
        ms = summed(
            [
                self._times(step) if self._device is None else step.ms(False)
                for step in steps
            ]
        )
        row: dict[str, Any] = {
            "time": round(end, 3),
            "step": last,
            "steps": sum(step.done for step in steps),
        }
        row |= {
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
            row["device_ms"] = rounded(summed([self._times(step) for step in steps]))
        times = self._of_steps(steps)
        if times:
            row |= describe(times, last - len(times) + 1)
        regions = summed([step.regions for step in steps])
        return row | ({"regions": rounded(regions)} if regions else {})

    def close(self) -> None:
        """Write the last rows. Time after the last complete step counts to the last of
        them.
        """
        self._read()
        if self._now is not self._setup and not self._now.done and len(self._steps) > 1:
            rest = self._steps.pop()
            for name, seconds in rest.host.items():
                self._steps[-1].host[name] = (
                    self._steps[-1].host.get(name, 0.0) + seconds
                )
        if self._steps or self._setup is not None:
            self._write()


def summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums by name."""
    return {
        name: sum(part.get(name, 0.0) for part in parts)
        for name in dict.fromkeys(chain(*parts))
    }


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Return milliseconds with three decimals."""
    return {name: round(value, 3) for name, value in values.items()}


def describe(steps: Sequence[Mapping[str, float]], first: int) -> dict[str, Any]:
    """Return the median and the slowest of consecutive steps (milliseconds by span),
    numbered from `first` on.
    """
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


def marked(name: str) -> AbstractContextManager[object]:
    """Open a range in torch.profiler (if active) and NVTX (if CUDA is active); the
    context closes it.
    """
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
        with marked(name):
            yield
    finally:
        if active and threading.current_thread() is threading.main_thread():
            active[-1].add_region(name, time.perf_counter() - begin)
