"""Detect DataLoader workers that died or hang.

They may be out of shared memory, killed by a signal, or blocked on storage.
"""

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess

from kd.core.errors import RunError
from kd.core.host import process_stat

STATES = {
    "T": "stopped",
    "t": "stopped by a debugger",
    "D": "waiting for the storage",
    "Z": "dead",
}
"""States of a process (`man 5 proc`) in which it cannot work."""
ENDED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.*)", re.DOTALL)
WHERE = "data.workers"


def require_shared_memory(needed: int, free: float, workers: int) -> None:
    """Require shared memory for the workers' batches.

    `needed`: bytes for all ranks here; `free`: MiB.
    """
    if workers and needed / 2**20 > free:
        wrong = (
            f"the batches of {workers} workers take about {needed / 2**20:.0f} MiB of"
            f" shared memory; /dev/shm has {free:.0f} MiB free"
        )
        allowed = "Docker gives a container 64 MB unless told otherwise"
        remedy = (
            f"Start the container with --shm-size={max(1, round(2 * needed / 2**30))}g,"
            " or set fewer data.workers, or data.workers=0"
        )
        raise RunError(WHERE, wrong, allowed, remedy)


def worker_error(error: Exception) -> RunError | None:
    """Return a RunError for torch's "DataLoader worker exited", else None."""
    # Torch raises it in a signal handler, at any line of the main thread.
    match = ENDED.search(str(error))
    if not isinstance(error, RuntimeError) or match is None:
        return None
    return _ended(match[1], match[2].strip().partition(". ")[0].rstrip("."))


def connection_error(
    error: Exception, workers: Sequence[BaseProcess]
) -> RunError | None:
    """Return a RunError if a batch's worker has just died, else None."""
    if not isinstance(error, (OSError, EOFError)):
        return None
    for worker in workers:
        worker.join(0.2)
    ended = [f"{worker.pid}" for worker in workers if worker.exitcode is not None]
    if not ended:
        return None
    return _ended(", ".join(ended), str(error) or type(error).__name__)


def _ended(pids: str, reason: str) -> RunError:
    remedy = (
        "The system kills a process where memory is short: see `dmesg`, set fewer"
        " data.workers, or raise --shm-size of a container. The same command resumes"
        " from the last checkpoint"
    )
    wrong = f"the worker process {pids} has ended ({reason})"
    return RunError(WHERE, wrong, "", remedy)


class Watch(threading.Thread):
    """This thread kills the workers if a batch does not arrive in time."""

    # `DataLoader(timeout=2)` is not enough: with one of two workers stopped, six of six
    # loops still waited after 15 seconds (torch 2.15). The stopped worker had announced
    # a batch, and the main thread waits for the rest without a limit. Time in which
    # this process itself was stopped does not count.

    def __init__(
        self, workers: Callable[[], Sequence[BaseProcess]], seconds: float
    ) -> None:
        super().__init__(daemon=True, name="kd-watch")
        self.waiting = True  # whether the loop waits for a batch
        self.number = 0  # of that batch in the epoch
        self.late = ""  # finally, the worker that did not deliver it
        self._workers = workers
        self._seconds = seconds
        self._over = threading.Event()

    def run(self) -> None:
        tick = min(1.0, self._seconds / 4)
        number = 0
        waited = 0.0
        while not self._over.wait(tick):
            if self.waiting and self.number == number:
                waited += tick
            else:
                waited = 0.0
            number = self.number
            if waited >= self._seconds:
                workers = self._workers()
                self.late = describe_late(workers, self.number, self._seconds)
                for worker in workers:
                    with suppress(OSError, TypeError):
                        os.kill(worker.pid, signal.SIGKILL)  # type: ignore[arg-type]
                return

    def close(self) -> None:
        self._over.set()

    def error(self) -> RunError | None:
        if not self.late:
            return None
        remedy = (
            "See what holds it up (the storage, a debugger, a full /dev/shm), or raise"
            " backend.timeout_seconds. The same command resumes from the last"
            " checkpoint"
        )
        return RunError(WHERE, self.late, "", remedy)


def describe_late(workers: Sequence[BaseProcess], number: int, seconds: float) -> str:
    """Name the late workers in a sentence.

    They are those that the system reports as stopped, else the one whose turn it is.
    """
    processes = []
    stopped = []
    for i, worker in enumerate(workers):
        stat = process_stat(worker.pid or 0)
        state = STATES.get(stat[0], "") if stat else ""
        processes.append(f"worker {i} (process {worker.pid})")
        if state:
            stopped.append(f"worker {i} (process {worker.pid}, {state})")
    if not stopped and workers:
        # torch assigns batches to workers in turn
        stopped = [processes[number % len(workers)]]
    names = " and ".join(stopped) or "a worker"
    return f"{names} made no batch within {seconds:g} seconds"


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM in this thread and in processes that it forks.

    All threads of these processes block it too.
    """
    # Blocking inside a worker is too late: torch starts threads there before kd's code
    # runs, and a signal ends the process through any thread that does not block it.
    if sys.platform != "linux":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve_until_the_trainer_ends(number: int) -> None:
    """Let only the trainer end this worker by SIGTERM.

    The signal is blocked since the fork. This is a `worker_init_fn`.
    """
    # torchrun, Slurm, `timeout` and others send SIGTERM to the whole process group. A
    # trainer that finishes its step still needs its workers. If the trainer dies,
    # torch's worker notices within seconds. Only Linux reports a signal's sender.
    if sys.platform == "linux":
        threading.Thread(
            target=_end_with_trainer, args=(os.getppid(),), daemon=True
        ).start()


def _end_with_trainer(trainer: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)
