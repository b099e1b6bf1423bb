"""Log lines: a reader of stderr that stalls stops nobody, and what is dropped is counted."""

import logging
import os
import time

from kd.deploy.serve.metrics import WAITING, Lines


def test_a_stalled_reader_stops_nobody():
    """Issue 49: before, whoever logged waited in `write` after 64 KiB."""
    read, write = os.pipe()
    handler = Lines(write)
    begin = time.monotonic()
    for number in range(3 * WAITING):
        handler.emit(logging.makeLogRecord({"msg": f"{number:04d} {'x' * 200}"}))
    handler.finish()
    assert time.monotonic() - begin < 10
    assert WAITING <= handler.dropped < 3 * WAITING
    kept, told = [], 0
    with os.fdopen(read) as reader:
        while len(kept) < 3 * WAITING - handler.dropped:
            line = next(reader)
            if "were dropped" in line:
                told += int(line.split()[0])
            else:
                kept.append(int(line[:4]))
    assert told == handler.dropped
    assert kept == sorted(set(kept))
