"""Commands of kd in processes beside this one, each with its output in a file."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kd.core.errors import Interrupted, KdError

LAST_BYTES = 2**14
"""Of an output, which are searched for its last line: an error of kd is one line of some hundred bytes."""
PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when the one that started it ends."""


class Processes:
    """Commands that run; those that still do when the block ends are asked to stop, and write a checkpoint.

    On Linux also where this process is killed: they would go on training for nobody, and hold their folders.
    """

    def __init__(self) -> None:
        self.running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        for process, _ in self.running.values():
            process.terminate()  # once: a second signal would end it without a checkpoint
        for process, _ in self.running.values():
            process.wait()

    def start(self, name: str, words: Sequence[str], output: Path) -> None:
        """Start `kd WORDS`, by a name; its output is added to a file."""
        with output.open("ab") as file:
            command = [sys.executable, "-m", "kd", *words]
            own = partial(_end_with, os.getpid()) if sys.platform == "linux" else None
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, preexec_fn=own)
        self.running[name] = process, output

    def ended(self) -> dict[str, str]:
        """Return those that have ended since the last call, each with the last line of its output if it failed.

        Raises:
            Interrupted: one was stopped by somebody else.
        """
        found = {}
        for name, (process, output) in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[name]
            if code in (Interrupted.exit_code, -signal.SIGTERM, -signal.SIGINT):
                raise Interrupted(f"'{name}' was stopped; the same command resumes")
            if code < 0:  # what it wrote last is no error
                found[name] = f"was ended by signal {-code}"
            elif code == 1:
                found[name] = f"ended with a traceback, which '{output}' has"
            else:
                found[name] = "" if code == 0 else _last_line(output) or f"ended with exit code {code}"
        return found


def _end_with(parent: int) -> None:
    """In the new process: ask the kernel for SIGTERM when the parent ends; it may have ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(Interrupted.exit_code)


def failure(line: str) -> KdError:
    """Return the error that a process has printed as its last line."""
    where, _, wrong = line.partition(": ")
    return KdError(where, wrong) if wrong else KdError("kd-sweep", line)


def _last_line(file: Path) -> str:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - LAST_BYTES))
        lines = opened.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
