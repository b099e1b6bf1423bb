"""How long a thread or a process computes or would like to: what is left is waiting for bytes, or for others."""

from __future__ import annotations

import os
import time


class BusyClock:
    """Seconds in which the calling thread has computed, or waited for a core, since some moment.

    On a machine with neighbours a thread that decodes may get a core for a fraction of its time. Its CPU time alone
    would then look as if it waited for the disk. Linux counts the time in the queue of a core; other systems do not.
    """

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def __call__(self) -> float:
        """Return the seconds; about 3 microseconds."""
        queued = _queued(os.pread(self._file, 64, 0)) if self._file >= 0 else 0.0
        return time.thread_time() + queued

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def queued_seconds(pid: int) -> float:
    """Return how long a process has waited for a core so far; 0.0 where the system does not tell."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return _queued(file.read(64))
    except OSError:
        return 0.0


def _queued(text: bytes) -> float:
    """Return the second number of a schedstat (nanoseconds in a queue) in seconds."""
    fields = text.split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0
