"""Metrics and logs of the endpoint: counters in Prometheus' text format (0.0.4), and non-blocking log lines."""

import json
import logging
import os
import queue
import sys
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from kd.deploy.shift import CONFIDENCE, ShiftWatch

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_LABELS = 100  # most labels with their own series: 10,000 classes would make 600 kB per scrape
WAITING = 1024
"""Lines queued for the reader of stderr. A pipe holds 64 KiB, about 600 lines; as many again cover a pausing reader. A
thousand lines take 100 kB of memory."""
LAST_SECONDS = 1.0  # seconds to write queued lines at the end: a stalled reader must not delay SIGTERM


class Metrics:
    """Counters and histograms of the endpoint. Thread-safe.

    `expected`: the share of images passed on to a second model, see `Description`; None: there is one model.
    """

    def __init__(self, model: str, version: str, expected: Sequence[float] | None = None) -> None:
        self.model, self.version, self.expected = model, version, expected
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, int], int] = defaultdict(int)
        self._buckets: dict[str, list[int]] = {}
        self._sums: dict[str, float] = defaultdict(float)
        self._images = self._passed_on = 0
        self.self_check: bool | None = None  # whether the self-check passed; None: it was not run
        self.log: Lines | None = None  # the handler whose dropped lines are counted; None: no queue

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a finished request. `route` is a fixed name, never text from a client."""
        with self._lock:
            self._requests[route, status] += 1
        self.stage(f"{route} total", seconds)

    def stage(self, name: str, seconds: float) -> None:
        with self._lock:
            buckets = self._buckets.setdefault(name, [0] * (len(BOUNDS) + 1))
            buckets[bisect_left(BOUNDS, seconds)] += 1
            self._sums[name] += seconds

    def images(self, count: int, passed_on: int = 0) -> None:
        """Count images, and those among them that the second model predicted."""
        with self._lock:
            self._images += count
            self._passed_on += passed_on

    def text(self, ready: bool, in_flight: int, buffered: int, watch: ShiftWatch | None = None) -> str:
        """Return all metrics as text; with `watch` also those of the predictions."""
        info = f'{{name="{_escape(self.model)}",version="{_escape(self.version)}"}} 1'
        with self._lock:
            counts = [f'{{route="{r}",status="{s}"}} {count}' for (r, s), count in sorted(self._requests.items())]
            lines = [
                *_metric("kd_model_info", "gauge", "The model that is served.", info),
                *_metric("kd_ready", "gauge", "1 while a load balancer should send requests.", f" {int(ready)}"),
                *_metric("kd_in_flight", "gauge", "Requests in progress or waiting.", f" {in_flight}"),
                *_metric("kd_buffered_bytes", "gauge", "Bytes of bodies in memory.", f" {buffered}"),
                *_metric("kd_images_total", "counter", "Images classified.", f" {self._images}"),
                *self._passed_on_lines(),
                *_metric("kd_requests_total", "counter", "Requests by route and status.", *counts),
                *_metric("kd_seconds", "histogram", "Where the time of a request goes."),
            ]
            for stage, buckets in sorted(self._buckets.items()):
                total = 0
                for bound, count in zip((*(f"{bound:g}" for bound in BOUNDS), "+Inf"), buckets, strict=True):
                    total += count
                    lines.append(f'kd_seconds_bucket{{stage="{stage}",le="{bound}"}} {total}')
                lines.append(f'kd_seconds_sum{{stage="{stage}"}} {self._sums[stage]:.6f}')
                lines.append(f'kd_seconds_count{{stage="{stage}"}} {total}')
        if self.self_check is not None:
            text = "1 if pixels and outputs of the self-check are those at the export."
            lines += _metric("kd_self_check", "gauge", text, f" {int(self.self_check)}")
        lines += _answers(watch) if watch else []
        if self.log is not None:
            text = "Log lines dropped because stderr was not read."
            lines += _metric("kd_log_lines_dropped_total", "counter", text, f" {self.log.dropped}")
        lines += _metric("process_resident_memory_bytes", "gauge", "Memory of this process.", f" {resident_bytes()}")
        return "\n".join(lines) + "\n"

    def _passed_on_lines(self) -> list[str]:
        if self.expected is None:
            return []
        shares: dict[str, float] = dict(
            zip(("validation", "validation low", "validation high"), self.expected, strict=False)
        )
        if self._images:
            shares["endpoint"] = self._passed_on / self._images
        samples = (f'{{of="{name}"}} {share:.6f}' for name, share in shares.items())
        text = "Share of images passed on; low and high: ends of validation's 95 % interval."
        return [
            *_metric("kd_passed_on_total", "counter", "Images of the second model.", f" {self._passed_on}"),
            *_metric("kd_passed_on_share", "gauge", text, *samples),
        ]


def resident_bytes() -> int:
    """Return the resident memory of this process, or 0 where /proc does not exist."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _answers(watch: ShiftWatch) -> list[str]:
    """Return counts of predictions, and their differences from validation."""
    found, reference = watch.found, watch.reference
    lines = []
    if CONFIDENCE in reference.bounds:
        frequent = sorted(watch.answered.most_common(MOST_LABELS))
        answered = [f'{{label="{_escape(label)}"}} {count}' for label, count in frequent]
        lines += _metric("kd_labels_total", "counter", f"Predicted labels, the {MOST_LABELS} most frequent.", *answered)
        # A gauge: it falls when a label joins the most frequent ones. A class may be named "other".
        other = watch.answered.total() - sum(count for _, count in frequent)
        lines += _metric("kd_labels_other", "gauge", "Predictions of any other label.", f" {other}")
        whose = "the first model's label" if reference.replaced else "the most probable label"
        lines += _metric("kd_confidence", "histogram", f"Probability of {whose} of an image.")
        counts = watch.all.bins[list(reference.bounds).index(CONFIDENCE)].sum(0).cumsum()
        ends = [*(f"{bound:g}" for bound in reference.bounds[CONFIDENCE]), "+Inf"]
        lines += [f'kd_confidence_bucket{{le="{end}"}} {count}' for end, count in zip(ends, counts, strict=True)]
        lines += [f"kd_confidence_sum {watch.all.confidence:.6f}", f"kd_confidence_count {counts[-1]}"]
    if reference.replaced:
        lines += _metric("kd_expected_accuracy", "gauge", "Unknown with a second model: validation had the first.")
    elif reference.calibrated and reference.right >= 0 and found.images:
        text = "Accuracy on validation images, shifted by the change of the mean confidence in the last window."
        lines += _metric("kd_expected_accuracy", "gauge", text, f" {reference.expected(found.confidence):.6f}")
    values = {"appearance": found.appearance, "labels": found.labels}
    text = "-log10 of the p-value that the last images are like those of validation; 6 or more is an alarm."
    lines += _metric("kd_shift", "gauge", text, *(f'{{of="{name}"}} {value:.3f}' for name, value in values.items()))
    alarms = [f'{{of="{name}"}} {count}' for name, count in watch.alarms.items()]
    return lines + _metric("kd_shift_alarms_total", "counter", "Windows that raised an alarm.", *alarms)


def _metric(name: str, kind: str, meaning: str, *samples: str) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", *(name + sample for sample in samples)]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class JsonLines(logging.Formatter):
    """Formats each record as a JSON object, with the message's `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        found = {"time": when, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        error = {"error": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**found, **getattr(record, "fields", {}), **error})


class Lines(logging.Handler):
    """Writes lines in its own thread and drops lines when its queue is full; `dropped` counts them."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.dropped = 0
        self._descriptor = descriptor  # no stream: at exit Python would wait for the lock of a blocked write
        self._queue: queue.Queue[str] = queue.Queue(WAITING)
        threading.Thread(target=self._write, name="kd-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record as text; never waits."""
        try:
            self._queue.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self.dropped += 1

    def finish(self) -> None:
        """Wait until the lines are written, at most `LAST_SECONDS`."""
        written = threading.Thread(target=self._queue.join, daemon=True)
        written.start()
        written.join(LAST_SECONDS)

    def _write(self) -> None:
        told = 0
        while True:
            line = self._queue.get()
            if (lost := self.dropped) > told:
                line += f"{lost - told} log lines were dropped because stderr was not read\n"
                told = lost
            content = line.encode(errors="backslashreplace")
            try:
                while content:
                    content = content[os.write(self._descriptor, content) :]
            except OSError:  # the reader has gone
                self.dropped += 1
            self._queue.task_done()


def to_stderr(quiet: bool, log_format: str) -> Lines:
    """Send the logs of the endpoint and of uvicorn to stderr; `log_format` is "text" or "json"."""
    handler = Lines(sys.stderr.fileno())
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonLines() if log_format == "json" else text)
    # uvicorn warns about each unparsable request, which kd logs too, and about each offer to upgrade.
    for name, level in (("kd.serve", logging.WARNING if quiet else logging.INFO), ("uvicorn", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    return handler
