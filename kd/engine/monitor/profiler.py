"""Profile a few steps of a run: a trace for Perfetto, operators as text and JSON."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from kd.core.errors import RunError
from kd.files.storage import log, write_json, write_text

TOP = 30  # operators in operators.txt
USER_SCOPE = 7  # torch's number of a range marked by a program; it is not an operator
DTYPES = {
    "float": "float32",
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
    "double": "float64",
}


class Profiler:
    """Profile the steps `first` to `last` of a run, both included, into a folder."""

    def __init__(
        self,
        steps: Sequence[int],
        folder: Path,
        cuda: bool,
        span: Callable[[str], AbstractContextManager[object]],
    ) -> None:
        """Prepare to profile `steps`, (first, last) or empty, into `folder`."""
        # `cuda` also traces the GPU's kernels. Starting and writing take place in a
        # span of their own.
        self.first, self.last = (steps[0], steps[1]) if steps else (0, -1)
        self.folder = folder
        self.cuda = cuda
        self.span = span
        self._running: profile | None = None
        self._began = 0.0
        self._steps = 0
        self._last_step = 0

    def step(self, number: int) -> None:
        self._last_step = number
        if self.first <= number <= self.last and self._running is None:
            # it logs a missing GPU as an error
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")
            activities = [ProfilerActivity.CPU]
            if self.cuda:
                activities.append(ProfilerActivity.CUDA)
            with self.span("profile"):
                running = profile(
                    activities=activities, profile_memory=True, record_shapes=True
                )
                self._running = running.__enter__()
                self._began = time.perf_counter()
        elif self._running is not None and number > self.last:
            self.close()
        self._steps += self._running is not None

    def close(self) -> None:
        running = self._running
        self._running = None
        if running is None:
            if self._last_step < self.first:
                log.warning(
                    f"profile.steps: the run ended at step {self._last_step}, so"
                    " nothing was profiled"
                )
            return
        wall_ms = 1000 * (time.perf_counter() - self._began)
        with self.span("profile"):
            running.__exit__(None, None, None)
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                running.export_chrome_trace(str(self.folder / "trace.json.gz"))
                device = "device" if self.cuda else "cpu"
                table = running.key_averages().table(
                    sort_by=f"self_{device}_time_total",
                    row_limit=TOP,
                    max_name_column_width=80,
                )
                write_text(self.folder / "operators.txt", table, "profile")
                content = {
                    "steps": self._steps,
                    "wall_ms": wall_ms,
                    "operators": operators(running, self.cuda),
                }
                write_json(self.folder / "operators.json", content)
            except (OSError, RunError) as error:
                log.warning(
                    f"profile: '{self.folder}' cannot be written ({error}). Training"
                    " goes on without it."
                )


def operators(profiled: profile, cuda: bool) -> list[dict[str, Any]]:
    """Return name, first tensor's type, calls and ms of each operator, longest first.

    On CUDA the milliseconds of the kernels that the operator itself launched, else of
    the host. Ranges that a program marked, such as spans of a run, are left out.
    """
    assert profiled.profiler is not None
    types = {
        event.correlation_id(): event.dtypes()
        for event in profiled.profiler.kineto_results.events()  # pyright: ignore
    }
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for event in profiled.events() or ():
        if event.device_type != DeviceType.CPU or event.scope == USER_SCOPE:
            continue
        dtypes = [DTYPES[name] for name in types.get(event.id, ()) if name in DTYPES]
        dtype = dtypes[0] if dtypes else ""
        row = rows.setdefault(
            (event.name, dtype),
            {"name": event.name, "dtype": dtype, "calls": 0, "ms": 0.0},
        )
        us = event.self_device_time_total if cuda else event.self_cpu_time_total
        row["calls"] += 1
        row["ms"] += us / 1000
    return sorted(rows.values(), key=lambda row: -row["ms"])
