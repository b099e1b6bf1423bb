"""What a data worker does with signals."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import traceback

from kd.errors import DataError


def serve_until_the_trainer_ends(number: int) -> None:
    """Let only the trainer end this worker by SIGTERM; the DataLoader calls this in worker `number`.

    torchrun, Slurm and others send SIGTERM to the whole process group. A trainer that finishes its step then still
    needs its workers. If the trainer dies, torch's worker notices within seconds. Only Linux tells who sent a signal.
    """
    if sys.platform != "linux":
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # threads that start later inherit it
    threading.Thread(target=_wait, args=(os.getppid(),), daemon=True).start()


def lost_worker(error: BaseException) -> DataError | None:
    """Return what a failure of torch's DataLoader means to a user (a worker is gone), or None for any other error.

    torch's handler of SIGCHLD raises the same error again whenever another worker ends, wherever this process is then.
    It is taken away. A DataLoader made later still finds a lost worker, by its own polling.
    """
    found = re.match(
        r"DataLoader worker \(pid\D* ?([\d, ]+)\) (is killed by signal: \w+|exited unexpectedly)", str(error)
    )
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if found is None and "_try_get_data" not in frames:  # where the pipe of a worker that ends now is read
        return None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    wrong = f"the data worker (pid {found[1]}) {found[2]}" if found else "a data worker ended unexpectedly"
    remedy = "If the memory was full, set data.workers lower. The same command resumes from the last checkpoint"
    return DataError("data.workers", wrong, "", remedy)


def _wait(trainer: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)
