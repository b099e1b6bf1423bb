"""The page for Prometheus; log lines: a reader of stderr that stalls stops nobody, what
is dropped is counted.
"""

import logging
import os
import re
import time
from types import SimpleNamespace

from kd.deploy.serve.app import _bug_response
from kd.deploy.serve.logs import WAITING, LogQueue
from kd.deploy.serve.metrics import BOUNDS, MOST_LABELS, Metrics
from kd.deploy.shift import Reference, ShiftWatch


def test_the_text_is_for_prometheus():
    state = SimpleNamespace(ready=True, in_progress=3, buffered=4096)
    metrics = Metrics('a "name"\nof two lines', "v1", state)
    for seconds in (0.0005, 0.003, 0.003, 99.0):
        metrics.request("invocations", 200, seconds)
    metrics.request("invocations", 415, 0.2)
    text = metrics.text().decode()
    sample = re.compile(
        r'[a-z_]+(\{[a-z]+="(\\.|[^"\\])*"(,[a-z]+="(\\.|[^"\\])*")*\})? [0-9.e+-]+'
    )
    for line in text.splitlines():
        assert line.startswith(("# HELP ", "# TYPE ")) or sample.fullmatch(line), line
    values = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")
    )
    assert float(values['kd_requests_total{route="invocations",status="200"}']) == 4
    assert float(values["kd_in_flight"]) == 3
    assert float(values["kd_buffered_bytes"]) == 4096
    buckets = [float(v) for k, v in values.items() if k.startswith("kd_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert len(buckets) == len(BOUNDS) + 1
    assert (
        buckets[-1] == float(values['kd_seconds_count{stage="invocations total"}']) == 5
    )
    assert float(values["process_resident_memory_bytes"]) > 1_000_000


def test_labels_beyond_the_most_frequent_are_counted_together():
    """Each label of an image counts, the image once."""
    names = [f"label {i}" for i in range(MOST_LABELS + 2)]
    watch = ShiftWatch(Reference.of(names, (), calibrated=False))
    for count in (MOST_LABELS + 2, MOST_LABELS + 1, MOST_LABELS):
        labels = [{"label": name, "score": 0.8} for name in names[:count]]
        watch.add({"labels": labels, "top": labels}, (100.0, 5.0, 0.0, 0.0))
    metrics = Metrics(
        "name", "v1", SimpleNamespace(ready=True, in_progress=0, buffered=0)
    )
    metrics.watch_shift(watch)
    text = metrics.text().decode()
    assert text.count("\nkd_labels_total{") == MOST_LABELS
    assert "\nkd_labels_other 3.0\n" in text  # two of one label, one of another
    assert "\nkd_confidence_count 3.0\n" in text


def test_a_stalled_reader_blocks_no_thread():
    """Issue 49: before, whoever logged waited in `write` after 64 KiB."""
    read, write = os.pipe()
    handler = LogQueue(write)
    begin = time.monotonic()
    for number in range(3 * WAITING):
        handler.emit(logging.makeLogRecord({"msg": f"{number:04d} {'x' * 200}"}))
    handler.finish()
    assert time.monotonic() - begin < 10
    assert WAITING <= handler.dropped < 3 * WAITING
    numbers = []
    dropped = 0
    with os.fdopen(read) as reader:
        while len(numbers) < 3 * WAITING - handler.dropped:
            line = next(reader)
            if "were dropped" in line:
                dropped += int(line.split()[0])
            else:
                numbers.append(int(line[:4]))
    assert dropped == handler.dropped
    assert numbers == sorted(set(numbers))


def test_a_bug_is_logged_with_its_line_and_no_value(caplog):
    def inner() -> None:
        raise ValueError("a client's secret")

    try:
        inner()
    except ValueError as error:
        line = error.__traceback__.tb_next.tb_lineno
        answer = _bug_response(error, "abc")
    assert answer.status_code == 500
    assert [record.getMessage() for record in caplog.records] == [
        f"abc bug: ValueError at test_metrics.py:{line}"
    ]
    assert b"secret" not in answer.body
