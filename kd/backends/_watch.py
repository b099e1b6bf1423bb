"""Names the rank that the others wait for; the error of a late collective does not say which one it is."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from kd.backends._launch import Launch, store_prefix

MAX_NAMED = 4
"""Ranks that one line names; of the others it gives the number."""
CAUSES = "stopped, out of memory, or its machine is gone"


class Row(NamedTuple):
    """What a rank writes into the launcher's store."""

    beat: int
    """Grows with each write; 0: the rank has left, -1: it has not written yet."""
    collectives: int
    """Number of collectives that the rank has begun."""
    host: str
    finding: str
    """Of rank 0: who is waited for; "" for nobody."""


class Stragglers:
    """Two threads a rank: one writes this rank's row to the launcher's store, the other warns at half the deadline.

    Rank 0 compares the rows and adds what it finds to its own. The thread that warns never touches the store: a call
    to it does not return while the process that holds it is stopped.
    """

    counts_agree = True
    """Whether ranks that wait for each other have begun equally many collectives. Not in a pipeline: gloo counts its
    sends too."""

    def __init__(self, launch: Launch, deadline_seconds: float) -> None:
        """Connect to the store, and write the first row."""
        self.rank, self.patience = launch.rank, deadline_seconds / 2
        self._first_on_host = launch.local_rank == 0
        self._keys = [f"{store_prefix()}/watch/{rank}" for rank in range(launch.world_size)]
        # A connection of its own: calls on one connection wait for each other. The collective gives up before it.
        limit = timedelta(seconds=4 * deadline_seconds)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
        self._ended, self._beat, self._finding = threading.Event(), 0, ""
        now = time.monotonic()
        self._own_count, self._own_progress = 0, now
        self._progress = now
        """When a row last showed a new collective."""
        self._answer = now
        """When the store last answered."""
        self._rows = [Row(-1, 0, "", "")] * launch.world_size
        self._beats = [now] * launch.world_size
        """When each rank's beat last changed."""
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._exchange, self._warn)]
        self._write()

    def start(self) -> None:
        """Read the first rows, which every rank has written by now, and start the threads."""
        self._read()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads; one to which the store does not answer is left behind."""
        store_is_gone = self._ended.is_set()
        self._ended.set()
        for thread in filter(threading.Thread.is_alive, self._threads):
            thread.join(1.0)
        if not store_is_gone and not self._threads[0].is_alive():
            self._beat = -1
            with suppress(RuntimeError):
                self._write()

    def describe(self) -> str:
        """Return who is waited for, as a clause; "" where this rank has not waited long, or nobody stands out."""
        now, count = time.monotonic(), _collectives_begun()
        if count != self._own_count:
            self._own_count, self._own_progress = count, now
        if now - self._own_progress <= self.patience:
            return ""
        if self._rank_0_is_silent(now):
            return f"{_names(self._rows, [0])} (or the launcher beside it) does not respond: {CAUSES}"
        return self._finding

    def _rank_0_is_silent(self, now: float) -> bool:
        """Return whether rank 0, or the process that holds the store, stands still."""
        last = min(self._answer, self._beats[0])
        return self.rank != 0 and not self._ended.is_set() and bool(self._rows[0].beat) and last < now - self.patience

    def _wait(self) -> bool:
        return self._ended.wait(min(5.0, self.patience / 6))

    def _warn(self) -> None:
        before = ""
        while not self._wait():
            text = self.describe()
            speaks = self.rank == 0
            if self._rank_0_is_silent(time.monotonic()):  # rank 1 may be gone with rank 0's machine
                speaks = self.rank == 1 or (self._first_on_host and socket.gethostname() != self._rows[0].host)
            if text and text != before and speaks:
                logging.getLogger("kd").warning("backend: the other ranks wait: %s", text)
            before = text

    def _exchange(self) -> None:
        try:
            while not self._wait():
                self._write()
                self._read()
                self._finding = self._compared() if self.rank == 0 else self._rows[0].finding
        except (RuntimeError, ValueError):  # the process that held the store has ended
            self._ended.set()

    def _write(self) -> None:
        self._beat += 1
        row = Row(self._beat, _collectives_begun(), socket.gethostname(), self._finding)
        self._store.set(self._keys[self.rank], json.dumps(row))

    def _read(self) -> None:
        """Read the rows that matter here: rank 0 those of all, the others rank 0's."""
        for rank, key in enumerate(self._keys[: None if self.rank == 0 else 1]):
            row, now = Row(*json.loads(self._store.get(key))), time.monotonic()
            if row.beat != self._rows[rank].beat:
                self._beats[rank] = now
            if row.collectives != self._rows[rank].collectives:
                self._progress = now
            self._rows[rank] = row
        self._answer = time.monotonic()

    def _compared(self) -> str:
        """Return rank 0's finding: a rank that does not write, or one that has begun fewer collectives."""
        if not all(row.beat for row in self._rows):
            return self._finding
        limit = time.monotonic() - self.patience
        silent = [rank for rank, beat in enumerate(self._beats) if beat < limit and rank]
        if silent:
            return f"{_names(self._rows, silent)} {'do' if silent[1:] else 'does'} not respond: {CAUSES}"
        counts = [row.collectives for row in self._rows]
        if not self.counts_agree or self._progress > limit or min(counts) == max(counts):
            return ""
        behind = [rank for rank, count in enumerate(counts) if count == min(counts)]
        return f"{_names(self._rows, behind)} {'have' if behind[1:] else 'has'} not come to the step where they are"


def _collectives_begun() -> int:
    """Return the number of collectives that this rank has begun, DDP's included; 0 where torch does not count them."""
    try:
        # torch has no public counter (looked for in 2.15); this one has run with 2.4.1, 2.9.1 and 2.15
        return dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    except RuntimeError:
        return 0


def _names(rows: Sequence[Row], ranks: Sequence[int]) -> str:
    """Return "rank 3 on host a, rank 5 on host b" for rows of all ranks."""
    more = [f"{len(ranks) - MAX_NAMED} more ranks"] if len(ranks) > MAX_NAMED else []
    return ", ".join([f"rank {rank} on host {rows[rank].host}" for rank in ranks[:MAX_NAMED]] + more)
