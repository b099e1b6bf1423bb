"""SIGTERM and SIGINT in a command: training writes a checkpoint after its step; anything else ends at once.

Only commands install this. From Python, Ctrl-C stays a KeyboardInterrupt and SIGTERM ends the process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kd.core.errors import Interrupted

HANDLED = (signal.SIGTERM, signal.SIGINT)
TOGETHER = 1.0  # seconds in which two signals count as one: a launcher passes on what its whole group has received too


class Signals:
    """What this process was asked by signals, which are handled while a command runs."""

    _process, _training, _name, _first = 0, False, "", 0.0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals here, if this is the main thread, and restore what was there."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._process, self._training, self._name = os.getpid(), False, ""
        before = [signal.signal(number, self._receive) for number in HANDLED]
        try:
            yield
        finally:
            for number, handler in zip(HANDLED, before, strict=True):
                signal.signal(number, handler)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Remember a signal for `requested` here, instead of ending at once."""
        self._training = True
        try:
            yield
        finally:
            self._training = False
        if self._name:
            raise Interrupted(self._message())

    def requested(self) -> bool:
        return bool(self._name)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a data worker, in the same group: it serves until its trainer ends
            return
        if self._name and time.monotonic() - self._first < TOGETHER:
            return
        if self._name:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._name, self._first = signal.Signals(number).name, time.monotonic()
        if not self._training:
            raise Interrupted(self._message())
        # not print: the signal may have come in the middle of one
        os.write(2, f"{self._name}: finishing the step and writing a checkpoint; a second signal ends now\n".encode())

    def _message(self) -> str:
        return f"stopped by {self._name}; the same command resumes"


signals = Signals()  # of this process: it has only one set of handlers
