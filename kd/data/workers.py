"""What can end or stop the loader's worker processes: no shared memory, a signal, a storage that does not answer."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess

from kd.errors import RunError

STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for the storage", "Z": "dead"}
"""The states of a process (`man 5 proc`) in which it makes no batch."""
ENDED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.*)", re.DOTALL)
WHERE = "data.workers"


def require_shared_memory(needed: int, free: float, workers: int) -> None:
    """Require room in the shared memory for the batches that are on their way from the workers.

    Without room a worker cannot hand its batch over, and the run would wait for it.

    Args:
        needed: bytes, of all ranks of this machine.
        free: MiB; infinity where the system has no limit of its own.
        workers: of a loader.

    Raises:
        RunError: there is too little.
    """
    if workers and needed / 2**20 > free:
        raise RunError(
            WHERE,
            f"the batches on their way from {workers} workers take about {needed / 2**20:.0f} MiB of shared memory; "
            f"/dev/shm has {free:.0f} MiB free",
            "Docker gives a container 64 MB unless told otherwise",
            f"Start the container with --shm-size={max(1, round(2 * needed / 2**30))}g, or set fewer data.workers, or "
            "data.workers=0",
        )


def worker_error(error: Exception) -> RunError | None:
    """Return what the end of a worker process means to a user, or None for any other error.

    Torch raises it wherever the main thread is, from a signal handler.
    """
    found = ENDED.search(str(error))
    if not isinstance(error, RuntimeError) or found is None:
        return None
    return _ended(found[1], found[2].strip().partition(". ")[0].rstrip("."))


def connection_error(error: Exception, workers: Sequence[BaseProcess]) -> RunError | None:
    """Return the same where a batch could not be fetched because its worker has just ended."""
    if not isinstance(error, (OSError, EOFError)):
        return None
    for worker in workers:
        worker.join(0.2)
    gone = [f"{worker.pid}" for worker in workers if worker.exitcode is not None]
    return _ended(", ".join(gone), str(error) or type(error).__name__) if gone else None


def _ended(pids: str, how: str) -> RunError:
    return RunError(
        WHERE,
        f"the worker process {pids} has ended ({how})",
        "",
        "The system kills a process where memory is short: see `dmesg`, set fewer data.workers, or raise --shm-size of "
        "a container. The same command resumes from the last checkpoint",
    )


class Watch(threading.Thread):
    """Kills the workers where a batch does not arrive in time.

    A thread, because the wait itself cannot be given up: a stopped worker may already have announced a batch, and then
    the main thread waits for the rest of it without a limit. Time in which this process itself was stopped does not
    count.
    """

    def __init__(self, workers: Callable[[], Sequence[BaseProcess]], seconds: float) -> None:
        """Prepare to watch.

        Args:
            workers: returns the processes.
            seconds: that a batch may take.
        """
        super().__init__(daemon=True, name="kd-watch")
        self.waiting, self.number, self.late = True, 0, ""
        """Whether a batch is waited for, which one of the epoch, and, in the end, who did not deliver it."""
        self._workers, self._seconds, self._over = workers, seconds, threading.Event()

    def run(self) -> None:
        """Watch until `close`."""
        tick, number, waited = min(1.0, self._seconds / 4), 0, 0.0
        while not self._over.wait(tick):
            same = self.waiting and self.number == number
            number, waited = self.number, waited + tick if same else 0.0
            if waited >= self._seconds:
                workers = self._workers()
                self.late = late(workers, self.number, self._seconds)
                for worker in workers:
                    with suppress(OSError, TypeError):
                        os.kill(worker.pid, signal.SIGKILL)  # type: ignore[arg-type]
                return

    def close(self) -> None:
        """End watching."""
        self._over.set()

    def error(self) -> RunError | None:
        """Return what was found; None: every batch was in time."""
        if not self.late:
            return None
        remedy = "See what holds it up (the storage, a debugger, a full /dev/shm), or raise backend.timeout_seconds. "
        return RunError(WHERE, self.late, "", remedy + "The same command resumes from the last checkpoint")


def late(workers: Sequence[BaseProcess], number: int, seconds: float) -> str:
    """Say which worker is late: one that the system shows as stopped, or the one whose turn it is."""
    states = [process_state(worker.pid or 0) for worker in workers]
    held = [i for i, state in enumerate(states) if state in STATES]
    turn = number % max(1, len(workers))  # torch deals the batches out in turns
    told = [
        f"worker {i} (process {workers[i].pid}{', ' + STATES[states[i]] if states[i] in STATES else ''})"
        for i in held or [turn] * bool(workers)
    ]
    return f"{' and '.join(told) or 'a worker'} made no batch within {seconds:g} seconds"


def process_state(pid: int) -> str:
    """Return the state of a process as one letter; "" where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def serve_until_the_trainer_ends(number: int) -> None:
    """Let only the trainer end this worker by SIGTERM; the DataLoader calls this in worker `number`.

    torchrun, Slurm and others send SIGTERM to the whole process group. A trainer that finishes its step then still
    needs its workers. If the trainer dies, torch's worker notices within seconds. Only Linux tells who sent a signal.
    """
    if sys.platform != "linux":
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # threads that start later inherit it
    threading.Thread(target=_wait, args=(os.getppid(),), daemon=True).start()


def _wait(trainer: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)
