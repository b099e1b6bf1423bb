"""Log lines that never stop the endpoint: a bounded queue before stderr, whose reader may stall."""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
from datetime import datetime, timezone

WAITING = 1024
"""Lines that wait for whoever reads stderr. A pipe holds 64 KiB, about 600 lines; as much again covers a reader that
pauses, and a thousand lines are 100 kB of memory."""
LAST_SECONDS = 1.0  # for the lines that wait when the server ends: a stalled reader must not hold up SIGTERM


class JsonLines(logging.Formatter):
    """A JSON object for each record, with what a message gave as `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        found = {"time": when, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        error = {"error": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**found, **getattr(record, "fields", {}), **error})


class Lines(logging.Handler):
    """Writes lines in a thread of its own, and drops those for which there is no room; `dropped` counts them."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.dropped = 0
        self._descriptor = descriptor  # no stream: Python's end would wait for the lock of one that stands in write
        self._queue: queue.Queue[str] = queue.Queue(WAITING)
        threading.Thread(target=self._write, name="kd-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record as text; never waits."""
        try:
            self._queue.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self.dropped += 1

    def finish(self) -> None:
        """Wait until the lines are written, `LAST_SECONDS` at most."""
        written = threading.Thread(target=self._queue.join, daemon=True)
        written.start()
        written.join(LAST_SECONDS)

    def _write(self) -> None:
        told = 0
        while True:
            line = self._queue.get()
            if (lost := self.dropped) > told:
                line += f"{lost - told} log lines were dropped, because nobody read stderr\n"
                told = lost
            content = line.encode(errors="backslashreplace")
            try:
                while content:
                    content = content[os.write(self._descriptor, content) :]
            except OSError:  # nobody reads any more
                self.dropped += 1
            self._queue.task_done()


def to_stderr(quiet: bool, log_format: str) -> Lines:
    """Send the log of the endpoint and of uvicorn to stderr; `log_format` is "text" or "json"."""
    handler = Lines(sys.stderr.fileno())
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonLines() if log_format == "json" else text)
    for name, level in (("kd.serve", logging.WARNING if quiet else logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    return handler
