"""Names the rank that the others wait for; the error of a late collective does not say which one it is."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

SHOWN = 4
"""Ranks that one line names; of the others it gives the number."""


class Stragglers:
    """Two threads a rank: one tells the launcher's store how far this rank is, the other warns at half the deadline.

    Each rank writes a row: beat (0: it has left), collectives begun, host. Rank 0 compares the rows and adds what it
    finds to its own. The thread that warns never touches the store: a call to it does not return while the process
    that holds it is stopped.
    """

    def __init__(
        self, rank: int, ranks: int, first_here: bool, deadline: float, keys: str, begun: Callable[[], int]
    ) -> None:
        """Connect to the store, and write the first row.

        Args:
            rank: of this process.
            ranks: of the world.
            first_here: it is the first rank of its machine.
            deadline: of a collective, seconds.
            keys: prefix of the keys in the store.
            begun: returns the number of collectives that this rank has begun.
        """
        self.rank, self._first_here, self.patience, self._begun = rank, first_here, deadline / 2, begun
        self.counts_agree = True
        """Ranks at one place have begun as many collectives; not so in a pipeline, where gloo counts sends too."""
        self._keys = [f"{keys}/watch/{other}" for other in range(ranks)]
        # A connection of its own: calls on one connection wait for each other. The collective gives up before it.
        address, port, limit = (
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            timedelta(seconds=4 * deadline),
        )
        self._store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
        self._over, self._beat, self._finding = threading.Event(), 0, ""
        now = time.monotonic()
        self._count, self._moved, self._changed, self._answered = 0, now, now, now
        self._rows: list[list] = [[-1, 0, "", ""] for _ in range(ranks)]
        self._heard = [now] * ranks
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._tell, self._warn)]
        self._write()

    def start(self) -> None:
        """Read the first rows, which every rank has written by now, and start the threads."""
        self._read()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads; one to which the store does not answer is left behind."""
        gone = self._over.is_set()  # the process that held the store has ended
        self._over.set()
        for thread in filter(threading.Thread.is_alive, self._threads):
            thread.join(1.0)
        if not gone and not self._threads[0].is_alive():
            self._beat = -1
            with suppress(RuntimeError):
                self._write()

    def named(self) -> str:
        """Return who is waited for, as a clause; "" where this rank has not waited long, or nobody stands out."""
        now, count = time.monotonic(), self._begun()
        if count != self._count:
            self._count, self._moved = count, now
        if now - self._moved <= self.patience:
            return ""
        if self._lost(now):
            return f"{told(self._rows, [0])} (or the launcher beside it) does not respond: {WHY}"
        return self._finding

    def _lost(self, now: float) -> bool:
        """Return whether rank 0, or the process that holds the store, stands still."""
        last = min(self._answered, self._heard[0])
        return self.rank != 0 and not self._over.is_set() and bool(self._rows[0][0]) and last < now - self.patience

    def _wait(self) -> bool:
        return self._over.wait(min(5.0, self.patience / 6))

    def _warn(self) -> None:
        before = ""
        while not self._wait():
            text = self.named()
            speaks = self.rank == 0
            if self._lost(time.monotonic()):  # rank 1 may be gone with rank 0's machine
                speaks = self.rank == 1 or (self._first_here and socket.gethostname() != self._rows[0][2])
            if text and text != before and speaks:
                logging.getLogger("kd").warning("backend: the other ranks wait: %s", text)
            before = text

    def _tell(self) -> None:
        try:
            while not self._wait():
                self._write()
                self._read()
                self._finding = self._compared() if self.rank == 0 else self._rows[0][3]
        except (RuntimeError, ValueError):  # the process that held the store has ended
            self._over.set()

    def _write(self) -> None:
        self._beat += 1
        row = [self._beat, self._begun(), socket.gethostname(), self._finding]
        self._store.set(self._keys[self.rank], json.dumps(row))

    def _read(self) -> None:
        """Read the rows that matter here: rank 0 those of all, the others rank 0's."""
        for rank, key in enumerate(self._keys[: None if self.rank == 0 else 1]):
            row, now = json.loads(self._store.get(key)), time.monotonic()
            if row[0] != self._rows[rank][0]:
                self._heard[rank] = now
            if row[1] != self._rows[rank][1]:
                self._changed = now
            self._rows[rank] = row
        self._answered = time.monotonic()

    def _compared(self) -> str:
        """Return rank 0's finding: a rank that does not write, or one that all others are ahead of."""
        if not all(row[0] for row in self._rows):
            return self._finding
        old = time.monotonic() - self.patience
        silent = [rank for rank, heard in enumerate(self._heard) if heard < old and rank]
        if silent:
            return f"{told(self._rows, silent)} {'do' if silent[1:] else 'does'} not respond: {WHY}"
        counts = [row[1] for row in self._rows]
        if not self.counts_agree or self._changed > old or min(counts) == max(counts):
            return ""
        behind = [rank for rank, count in enumerate(counts) if count == min(counts)]
        return f"{told(self._rows, behind)} {'have' if behind[1:] else 'has'} not come to the step where they are"


WHY = "stopped, out of memory, or its machine is gone"


def told(rows: Sequence[Sequence], ranks: Sequence[int]) -> str:
    """Return "rank 3 on host a, rank 5 on host b" for rows of all ranks."""
    more = [f"{len(ranks) - SHOWN} more ranks"] if len(ranks) > SHOWN else []
    return ", ".join([f"rank {rank} on host {rows[rank][2]}" for rank in ranks[:SHOWN]] + more)
