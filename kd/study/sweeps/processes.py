"""Commands of kd in processes beside this one, each with its output in a file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kd.core.errors import Interrupted, KdError

NEWEST = 2**14
"""Bytes at the end of an output that are searched for its last line."""


class Processes:
    """Commands that run; those that still do when the block ends are asked to stop, and write a checkpoint."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
        self._asked: set[str] = set()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        for name in self.running:
            self.stop(name)
        for process, _ in self.running.values():
            process.wait()

    def start(self, name: str, words: Sequence[str], output: Path) -> None:
        """Start `kd WORDS`, by a name; its output is added to a file."""
        with output.open("ab") as file:
            command = [sys.executable, "-m", "kd", *words]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self.running[name] = process, output

    def stop(self, name: str) -> None:
        """Ask a process to stop, once: a second signal would end it at once."""
        if name not in self._asked:
            self._asked.add(name)
            self.running[name][0].terminate()

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
            if code in (Interrupted.exit_code, -15, -2) and name not in self._asked:
                raise Interrupted(f"'{name}' was stopped; the same command resumes")
            stopped = name in self._asked and code in (Interrupted.exit_code, -15)
            if code < 0 and not stopped:  # what it wrote last is no error
                found[name] = f"was ended by signal {-code}"
            elif code == 1:
                found[name] = f"ended with a traceback, which '{output}' has"
            else:
                found[name] = "" if code == 0 or stopped else _last_line(output) or f"ended with exit code {code}"
        return found


def failure(line: str) -> KdError:
    """Return the error that a process has printed as its last line."""
    where, _, wrong = line.partition(": ")
    return KdError(where, wrong) if wrong else KdError("kd-sweep", line)


def _last_line(file: Path) -> str:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - NEWEST))
        lines = opened.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
