"""torch.profiler for a few steps of a run: a trace for Perfetto, the top operators, the memory over time."""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from kd.files.storage import write_json

log = logging.getLogger("kd")

TOP = 30
"""Operators that operators.json lists."""
POINTS = 2000
"""Most points of the memory's curve."""


class Profiler:
    """Profile the steps from `first` to `last`, both included, into a folder. Steps count from the start of the run."""

    def __init__(
        self, steps: Sequence[int], folder: Path, device: str, span: Callable[[str], AbstractContextManager[object]]
    ) -> None:
        """Prepare to profile `steps`, (first, last) or empty, into `folder`.

        The device "cuda" also traces the GPU's kernels. Starting and writing take place in a span of their own.
        """
        self.first, self.last = (steps[0], steps[1]) if steps else (0, -1)
        self.folder, self.device, self.span = folder, device, span
        self._running: profile | None = None

    def step(self, number: int) -> None:
        """Start or stop before the step of this number."""
        if self.first <= number <= self.last and self._running is None:
            with self.span("profile"):
                self._start()
        elif self._running is not None and number > self.last:
            self.close()

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # it reports a missing GPU as an error
        activities = [ProfilerActivity.CPU]
        if self.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(activities=activities, profile_memory=True)
        self._running.__enter__()

    def close(self) -> None:
        """Stop, if it runs, and write what was traced."""
        running, self._running = self._running, None
        if running is None:
            return
        with self.span("profile"):
            running.__exit__(None, None, None)
            try:
                self._write(running)
            except OSError as error:
                log.warning(f"profile: '{self.folder}' cannot be written ({error}). Training goes on without it.")

    def _write(self, done: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / "trace.json.gz"
        done.export_chrome_trace(str(trace))
        write_json(self.folder / "operators.json", operators(done.key_averages(), self.device), "profile")
        write_json(self.folder / "memory.json", memory(trace, self.device), "profile")


def operators(averages: Any, device: str) -> dict[str, Any]:
    """Return the top operators by the time that they take themselves, on the device where it has a time of its own."""
    by = "device_ms" if device == "cuda" else "cpu_ms"
    rows = [
        {
            "name": each.key,
            "calls": each.count,
            "cpu_ms": round(each.self_cpu_time_total / 1000, 4),
            "device_ms": round(each.self_device_time_total / 1000, 4),
        }
        for each in averages
    ]
    total = sum(row[by] for row in rows)
    rows.sort(key=lambda row: -row[by])
    for row in rows:
        row["share"] = round(row[by] / total, 5) if total else 0.0
    return {"by": by, "total_ms": round(total, 4), "operators": rows[:TOP]}


def memory(trace: Path, device: str) -> dict[str, Any]:
    """Return the allocated MiB over time from a trace; on a CPU, those of the profiled steps' own tensors."""
    kind = 1 if device == "cuda" else 0
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("name") == "[memory]"]
    events = [event for event in events if event["args"]["Device Type"] == kind]
    events.sort(key=lambda event: event["ts"])
    points = [
        [round((event["ts"] - events[0]["ts"]) / 1000, 3), round(event["args"]["Total Allocated"] / 2**20, 3)]
        for event in events
    ]
    return {"columns": ["ms", "mib"], "device": device, "points": thinned(points)}


def thinned(points: list[list[float]]) -> list[list[float]]:
    """Return at most `POINTS` points: of each stretch the one with the most memory, so that no peak is lost."""
    size = -(-len(points) // POINTS)
    return [max(points[i : i + size], key=lambda point: point[1]) for i in range(0, len(points), max(1, size))]
