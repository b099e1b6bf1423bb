"""A rank of a world in which rank `argv[0]` (-1: each) is late, because it is `argv[1]`: stopped or asleep."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from kd.backends.cpu import Options
from kd.cli.command import guarded
from kd.config.schema import BackendSection
from kd.setup.build import distributed

DEADLINE = 3.0
ALL = -1


def stop_for(seconds: float) -> None:
    """Stop this process; a child lets it go on."""
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, 0)


def train(rank: int, how: str) -> None:
    """Make steps of DDP, the third of them late on one rank."""
    options = Options(threads=1)
    section = BackendSection(kind="cpu", precision="fp32", timeout_seconds=DEADLINE, options=options)
    with distributed(section) as backend:
        model = backend.wrap(torch.nn.Linear(3, 3))
        for step in range(5):
            if step == 2 and rank in (backend.rank, ALL):
                (stop_for if how == "stopped" else time.sleep)(2 * DEADLINE)
            model(torch.ones(2, 3)).sum().backward()


def main(argv: list[str]) -> int:
    """Be a rank; print errors as the commands do."""
    code = guarded(lambda: train(int(argv[0]), argv[1]))
    sys.stdout.flush()
    return code
