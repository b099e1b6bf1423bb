"""Run commands of kd in processes of their own, stop them, and tell how they ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kd.core.errors import Interrupted, KdError
from kd.core.host import terminate_with_parent

POLL = 0.5  # seconds between two checks of the commands, which take minutes
LAST_BYTES = 2**14
"""Bytes at the end of an output searched for its last line.

kd's error is one line of some hundred bytes.
"""


class Processes:
    """Running commands, which get SIGTERM at the end or when this process is killed."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
        self.stopped = set[str]()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        for name in self.running:
            self.stop(name)
        for process, _ in self.running.values():
            process.wait()

    def start(
        self,
        name: str,
        words: Sequence[str],
        output: Path,
        inherited: Sequence[int] = (),
    ) -> None:
        """Start `kd WORDS` under a name; its output is appended to a file.

        `inherited`: open files that it keeps.
        """
        command = [sys.executable, "-m", "kd", *words]
        with output.open("ab") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                preexec_fn=terminate_with_parent(),
                pass_fds=inherited,
            )
        self.running[name] = process, output
        self.stopped.discard(name)

    def stop(self, name: str) -> None:
        """Let a command write a checkpoint and end."""
        # a second signal would end it without a checkpoint
        if name not in self.stopped:
            self.running[name][0].terminate()
        self.stopped.add(name)

    def ended(self) -> dict[str, str]:
        """Return the commands that ended since the last call, with their errors."""
        lines = {}
        for name, (process, output) in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[name]
            stopped = code in (Interrupted.exit_code, -signal.SIGTERM, -signal.SIGINT)
            if stopped and name not in self.stopped:
                raise Interrupted(f"'{name}' was stopped; the same command resumes")
            lines[name] = _last_line(code, output)
        return lines


def run_command(name: str, words: Sequence[str], output: Path) -> None:
    """Run a command to its end; raise its error."""
    with Processes() as processes:
        processes.start(name, words, output)
        while not (ended := processes.ended()):
            time.sleep(POLL)
    if ended[name]:
        raise failure(ended[name])


def failure(line: str) -> KdError:
    """Return the error in a process's last line of output."""
    place, _, wrong = line.partition(": ")
    return KdError(place, wrong) if wrong else KdError("kd-sweep", line)


def _last_line(code: int, output: Path) -> str:
    """Return how a command failed; "": it did not."""
    if code == 0:
        return ""
    if code < 0:  # its last output is not an error
        return f"was ended by signal {-code}"
    if code == 1:
        return f"ended with a traceback, which '{output}' has"
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - LAST_BYTES))
        text = file.read().decode(errors="replace").strip()
    return text.split("\n")[-1].strip() or f"ended with exit code {code}"
