"""What a data worker does with signals."""

from __future__ import annotations

import os
import signal
import sys
import threading


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
