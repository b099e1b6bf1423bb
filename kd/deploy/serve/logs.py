"""Write the endpoint's log to stderr.

A reader of stderr that stalls stops neither a request nor the end of the process.
"""

import json
import logging
import os
import queue
import sys
import threading
from datetime import datetime, timezone
from logging.handlers import QueueHandler, QueueListener

WAITING = 1024
"""Lines queued for the reader of stderr. A pipe holds 64 KiB, about 600 lines; as many
again cover a pausing reader. A thousand lines take 100 kB of memory.
"""
# seconds to write queued lines at the end: a stalled reader must not delay SIGTERM
LAST_SECONDS = 1.0
TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class JsonFormatter(logging.Formatter):
    """Formats each record as a JSON object, with its `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc)
        content = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            content["error"] = self.formatException(record.exc_info)
        return json.dumps(content)


class LogQueue(QueueHandler):
    """Queues formatted lines; drops and counts them (`dropped`) when it is full."""

    def __init__(self, descriptor: int) -> None:
        self._waiting: queue.Queue[logging.LogRecord] = queue.Queue(WAITING)
        super().__init__(self._waiting)
        self.dropped = 0
        writer = _Writer(descriptor, self)
        QueueListener(self._waiting, writer).start()  # type: ignore[arg-type]  # it only calls `handle`

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record; never waits."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def finish(self) -> None:
        """Wait until the lines are written, at most `LAST_SECONDS`."""
        writing = threading.Thread(target=self._waiting.join, daemon=True)
        writing.start()
        writing.join(LAST_SECONDS)


class _Writer:
    """Writes lines to a file descriptor.

    It is no `logging.Handler`: at exit Python would wait for the lock of a write.
    """

    level = logging.NOTSET

    def __init__(self, descriptor: int, lines: LogQueue) -> None:
        self._descriptor = descriptor
        self._lines = lines
        self._reported = 0

    def handle(self, record: logging.LogRecord) -> None:
        lines = f"{record.getMessage()}\n"
        lost = self._lines.dropped - self._reported
        if lost:
            lines += f"{lost} log lines were dropped because stderr was not read\n"
            self._reported += lost
        content = lines.encode(errors="backslashreplace")
        try:
            while content:
                written = os.write(self._descriptor, content)
                content = content[written:]
        except OSError:  # the reader has gone
            self._lines.dropped += 1


def to_stderr(quiet: bool, log_format: str) -> LogQueue:
    """Send the log of the endpoint to stderr; `log_format` is "text" or "json"."""
    handler = LogQueue(sys.stderr.fileno())
    json_lines = log_format == "json"
    handler.setFormatter(JsonFormatter() if json_lines else logging.Formatter(TEXT))
    # python_multipart logs refused forms, as kd does.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    logger = logging.getLogger("kd.serve")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    return handler
