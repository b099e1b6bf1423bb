"""Hostile clients in a process of their own: python attacker.py KIND PORT. They run
until they are stopped.
"""

from __future__ import annotations

import errno
import selectors
import socket
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

HEAD = b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
RATE_SLICE = 0.01


def _with_length(head: bytes, body: bytes) -> bytes:
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def _nested(item: bytes) -> bytes:
    return _with_length(HEAD, b"[" + item * (2**20 // len(item)) + b"0]")


class Attack(NamedTuple):
    """How one kind of client behaves."""

    connections: int
    begin: bytes
    """Sent once, when a connection is open."""
    repeat: bytes
    """Sent again and again after that; empty: nothing more."""
    reads: bool
    rate: float = 2e6
    """Bytes per second of all connections together."""


ATTACKS: dict[str, Attack] = {
    "slow readers": Attack(515, b"", 100 * b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", False),
    "idle connections": Attack(2000, b"", b"", False),
    "one-byte chunks": Attack(8, HEAD + b"transfer-encoding: chunked\r\n\r\n", 5000 * b"1\r\nx\r\n", True),
    "one-byte chunks, not awaited": Attack(
        500, b"POST /ping HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", 5000 * b"1\r\nx\r\n", True
    ),
    "many header lines": Attack(500, b"", b"GET /ping HTTP/1.1\r\n" + 3000 * b"a:\r\n" + b"\r\n", True),
    "long accept": Attack(64, b"", HEAD + b"accept: " + 15_000 * b"," + b"\r\ncontent-length: 0\r\n\r\n", True),
    "long query": Attack(
        64, b"", b"POST /invocations?" + 7000 * b"a&" + HEAD[17:] + b"content-length: 0\r\n\r\n", True
    ),
    "trailers": Attack(
        500, b"", HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + 3000 * b"a:\r\n" + b"\r\n", True
    ),
    "requests": Attack(256, b"", _with_length(HEAD, b"{}"), True, 20e6),
    "pipelined requests": Attack(500, b"", 1000 * b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n", True),
    "nested JSON": Attack(16, b"", _nested(b"[],"), True, 20e6),
    "nested objects": Attack(16, b"", _nested(b'{"":0},'), True, 20e6),
}  # fmt: skip


class _Client:
    def __init__(self, port: int, attack: Attack) -> None:
        self.attack = attack
        self.socket = socket.socket()
        if not attack.reads:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self.socket.setblocking(False)
        code = self.socket.connect_ex(("127.0.0.1", port))
        assert code in (0, errno.EINPROGRESS), code
        self.pending = memoryview(attack.begin or attack.repeat)

    def turn(self) -> int:
        """Send what fits, take what came, and return how many bytes were sent. Raises
        OSError when it is closed.
        """
        if self.attack.reads:
            try:
                if not self.socket.recv(65536):
                    raise ConnectionResetError
            except BlockingIOError:
                pass
        if not self.pending:
            return 0
        sent = self.socket.send(self.pending[:65536])
        self.pending = self.pending[sent:] or memoryview(self.attack.repeat)
        return sent


def run(attack: Attack, port: int) -> None:
    """Attack until this process is stopped."""
    selector = selectors.DefaultSelector()
    events = selectors.EVENT_WRITE | (selectors.EVENT_READ if attack.reads else 0)
    connect: Callable[[], _Client] = lambda: _Client(port, attack)  # noqa: E731
    for _ in range(attack.connections):
        client = connect()
        selector.register(client.socket, events, client)
    begin = time.monotonic()
    sent = 0
    announced = False
    while True:
        for key, _ in selector.select(1):
            client = key.data
            try:
                sent += client.turn()
            except BlockingIOError:
                continue
            except OSError:
                selector.unregister(client.socket)
                client.socket.close()
                client = connect()
                selector.register(client.socket, events, client)
            if sent > attack.rate * (time.monotonic() - begin + RATE_SLICE):
                time.sleep(RATE_SLICE)
            if not announced and time.monotonic() > begin + 0.3:
                print("attacking", flush=True)
                announced = True
        time.sleep(0.001)


if __name__ == "__main__":
    run(ATTACKS[sys.argv[1]], int(sys.argv[2]))
