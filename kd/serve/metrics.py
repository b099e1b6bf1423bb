"""Counters and histograms in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import defaultdict

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters and histograms of the endpoint. Thread-safe."""

    def __init__(self, model: str, version: str) -> None:
        self.model, self.version = model, version
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, int], int] = defaultdict(int)
        self._buckets: dict[str, list[int]] = {}
        self._sums: dict[str, float] = defaultdict(float)
        self._images = 0

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a finished request. `route` is a fixed name, never text from a client."""
        with self._lock:
            self._requests[route, status] += 1
        self.stage(f"{route} total", seconds)

    def stage(self, name: str, seconds: float) -> None:
        """Add a duration to the histogram of a stage."""
        with self._lock:
            buckets = self._buckets.setdefault(name, [0] * (len(BOUNDS) + 1))
            buckets[bisect_left(BOUNDS, seconds)] += 1
            self._sums[name] += seconds

    def images(self, count: int) -> None:
        """Count answered images."""
        with self._lock:
            self._images += count

    def text(self, ready: bool, in_flight: int, buffered: int) -> str:
        """Return all metrics as text."""
        with self._lock:
            lines = [
                *_head("kd_model_info", "gauge", "The model that answers."),
                f'kd_model_info{{name="{_escape(self.model)}",version="{_escape(self.version)}"}} 1',
                *_head("kd_ready", "gauge", "1 when the model is loaded and warmed up and the server is not ending."),
                f"kd_ready {int(ready)}",
                *_head("kd_in_flight", "gauge", "Requests being answered or waiting for it."),
                f"kd_in_flight {in_flight}",
                *_head("kd_buffered_bytes", "gauge", "Bytes of bodies in memory."),
                f"kd_buffered_bytes {buffered}",
                *_head("kd_images_total", "counter", "Images answered."),
                f"kd_images_total {self._images}",
                *_head("kd_requests_total", "counter", "Requests by route and status."),
            ]
            for (route, status), count in sorted(self._requests.items()):
                lines.append(f'kd_requests_total{{route="{route}",status="{status}"}} {count}')
            lines += _head("kd_seconds", "histogram", "Where the time of a request goes.")
            for name, buckets in sorted(self._buckets.items()):
                below = 0
                for bound, count in zip((*BOUNDS, float("inf")), buckets, strict=True):
                    below += count
                    le = "+Inf" if bound == float("inf") else f"{bound:g}"
                    lines.append(f'kd_seconds_bucket{{stage="{name}",le="{le}"}} {below}')
                lines += [
                    f'kd_seconds_sum{{stage="{name}"}} {self._sums[name]:.6f}',
                    f'kd_seconds_count{{stage="{name}"}} {below}',
                ]
        lines += [
            *_head("process_resident_memory_bytes", "gauge", "Memory of this process."),
            f"process_resident_memory_bytes {resident_bytes()}",
        ]
        return "\n".join(lines) + "\n"


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process, or 0 where /proc does not exist."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _head(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
