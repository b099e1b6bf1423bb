"""One hostile client at a time: what tests/e2e/attacker.py sends, damaged pictures,
hang-ups; a connection each.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))
from attacker import ATTACKS

PATIENCE = 15.0
"""Seconds that a client stays if the server does not close its connection."""
PIECE = 16_384


def damaged(url: str, picture: bytes) -> dict[str, bytes]:
    """Return requests that are well formed and whose pictures are not."""
    from _load import request

    message = request(url, picture, "image/jpeg")
    return {
        "cut picture": request(url, picture[: len(picture) // 2], "image/jpeg"),
        "noise": request(url, os.urandom(9999), "image/jpeg"),
        "no JSON": request(url, picture, "application/json"),
        "hang-up": message[: len(message) // 2],
    }


class Hostile:
    """Makes hostile clients, each of a kind drawn from all of them."""

    def __init__(self, url: str, picture: bytes, seed: int = 0) -> None:
        self.parts = urlsplit(url)
        self.rng = random.Random(seed)
        self.kinds: dict[str, Callable[[], object]] = {
            name: partial(self._attack, name) for name in ATTACKS
        }
        self.kinds |= {
            name: partial(self._once, sent)
            for name, sent in damaged(url, picture).items()
        }
        self.count = dict.fromkeys(self.kinds, 0)

    async def client(self) -> None:
        """Be one client, until the server closes its connection or for `PATIENCE`
        seconds.
        """
        kind = self.rng.choice(list(self.kinds))
        self.count[kind] += 1
        with suppress(
            OSError,
            asyncio.TimeoutError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
        ):
            await asyncio.wait_for(self.kinds[kind](), PATIENCE)  # type: ignore[arg-type]

    async def _once(self, sent: bytes) -> None:
        reader, writer = await asyncio.open_connection(
            self.parts.hostname, self.parts.port
        )
        writer.write(sent)
        await writer.drain()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(PIECE), 1.0)
        writer.transport.abort()

    async def _attack(self, name: str) -> None:
        attack = ATTACKS[name]
        end = time.monotonic() + PATIENCE
        reader, writer = await asyncio.open_connection(
            self.parts.hostname, self.parts.port
        )
        try:
            pending = attack.begin or attack.repeat
            # its own deadline: in Python 3.11 a time-out inside may swallow the
            # cancellation from outside
            while not reader.at_eof() and time.monotonic() < end:
                for start in range(0, len(pending), PIECE):
                    writer.write(pending[start : start + PIECE])
                    await writer.drain()
                    await asyncio.sleep(0.01)  # about 1.6 MB/s
                pending = attack.repeat
                if attack.reads:
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(reader.read(PIECE), 0.05)
                await asyncio.sleep(0.05)
        finally:
            writer.transport.abort()
