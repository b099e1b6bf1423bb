"""What uvicorn leaves open: connections that never send a request, and requests that arrive while it ends."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kd.serve.limits import Limits
from kd.serve.parser import Parser
from kd.serve.problems import MEDIA_TYPE, Problem
from kd.serve.service import Service
from kd.serve.turns import Turns

ACCEPTED_AT_ONCE, QUEUE = 64, 1024
READ_SIZE = 65_536
DISCARD_SECONDS = 1.0
HEALTH_CHECKS, HEALTH_BYTES = (b"GET /ping ", b"GET /v2/health/"), 2048
ACCEPT_SECONDS, SETTLE_SECONDS = 0.2, 1.0
ASGI = Callable[..., Any]
SO_ATTACH_FILTER, BPF_RETURN = 26, 0x06


@dataclass(frozen=True, slots=True)
class Shared:
    """What all connections of a server have in common."""

    limits: Limits
    health_only: ASGI
    """The application for connections beyond `Limits.max_connections`."""
    spare: dict[Connection, None] = field(default_factory=dict)
    """Those connections, the oldest first."""
    turns: Turns = field(default_factory=Turns)


class Connection(H11Protocol):
    """uvicorn's connection with deadlines for reading and writing, and a limit on how many there are.

    uvicorn closes a connection that idles between two requests. It sets no deadline for the first byte, for the rest of
    a header, or for a client that does not read its answer.

    A connection beyond the limit is accepted as a spare one: health checks are answered on it, everything else gets
    503, and it is closed after one answer. So a load balancer still sees a live server when clients hold every ordinary
    connection.
    """

    def __init__(self, *args: Any, shared: Shared, **named: Any) -> None:
        super().__init__(*args, **named)
        self.shared, self.limits = shared, shared.limits
        self.conn = Parser(self.limits)
        self._spare = False
        self._held: bytearray | None = None
        self._discarding = False
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # type: ignore[override]
        """Begin to wait for headers."""
        super().connection_made(transport)
        transport.max_size = READ_SIZE  # asyncio's own is 256 KiB; up to this much may wait for its turn
        transport.set_write_buffer_limits(high=0)  # pause_writing is called when the client does not read fast enough
        self._start_reading()
        if len(self.connections) - len(self.shared.spare) > self.limits.max_connections:
            self._become_spare()

    def _become_spare(self) -> None:
        spare = self.shared.spare
        self._spare, self.app = True, self.shared.health_only
        spare[self] = None
        if len(spare) > self.limits.spare_connections:
            oldest = next(iter(spare))
            del spare[oldest]
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse bytes in this turn of the event loop, or hold them until a later one. Health checks do not wait."""
        if self._discarding:
            return
        if self._held is not None:
            self._held += data
        elif self.shared.turns.free or (data.startswith(HEALTH_CHECKS) and len(data) < HEALTH_BYTES):
            self.shared.turns.run(functools.partial(self._parse, data))
        else:
            self._held = bytearray(data)
            self.transport.pause_reading()
            self.shared.turns.wait(self._parse_held)

    def _parse_held(self) -> None:
        data, self._held = bytes(self._held or b""), None
        if not self.transport.is_closing():
            self._parse(data)
            if not self.flow.read_paused:
                self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        """Take bytes; a request that has begun must bring its headers in time."""
        before = self.cycle
        idle = before is None or before.response_complete
        if idle and self._read_timer is None:
            self._start_reading()
        super().data_received(data)
        if self.cycle is not before and not self._discarding:
            self._stop_reading()

    def handle_events(self) -> None:
        """Start a request that is whole. The connection ends after it if the client pipelines: HTTP allows that."""
        super().handle_events()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and (self._spare or self.conn.pipelined):
            cycle.keep_alive = False

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read its answer."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop to wait: everything is sent."""
        super().resume_writing()
        self._stop_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_reading()
        self._stop_writing()
        self.shared.spare.pop(self, None)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP as every other problem is answered."""
        body = Problem(400, "This is not an HTTP request.").body
        headers = [
            (b"content-type", MEDIA_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        with suppress(h11.LocalProtocolError):  # an answer has begun already: all that is left is to close
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # whoever waits for the rest of the body learns that it will not come
            self.cycle.message_event.set()
        self._discard()

    def _discard(self) -> None:
        """End the connection, but read a little longer: closing it on unread bytes would take the answer back."""
        self._stop_reading()
        self._discarding = True
        self.transport.write_eof()
        self._read_timer = self.loop.call_later(DISCARD_SECONDS, self.transport.abort)

    def _start_reading(self) -> None:
        self._read_timer = self.loop.call_later(self.limits.header_seconds, self._give_up)

    def _stop_reading(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _stop_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _give_up(self) -> None:
        self._read_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class DrainingServer(uvicorn.Server):
    """uvicorn that tells the load balancer first, then takes what already knocked, then ends."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen. uvicorn's backlog is two things: the queue, and how many asyncio accepts before it reads."""
        await super().startup(sockets)
        for opened in sockets or []:
            opened.listen(QUEUE)

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """Answer every connection that the system has accepted, take no new ones, then end."""
        self.service.draining = True
        logging.getLogger("kd.serve").info("ending: %d requests are being answered", self.service.in_flight)
        for opened in sockets or []:
            _deafen(opened)
        start = time.monotonic()
        while (waited := time.monotonic() - start) < SETTLE_SECONDS:
            connections: Any = self.server_state.connections
            if waited > ACCEPT_SECONDS and all(connection.cycle is not None for connection in connections):
                break
            await asyncio.sleep(ACCEPT_SECONDS / 10)
        await super().shutdown(sockets)


def _deafen(listener: socket.socket) -> None:
    """Let a listening socket drop every new connection attempt, while those in its queue are still accepted.

    Closing it at once would reset whoever is in the queue: they are connected, and may have sent their request. A
    client whose attempt is dropped tries again a second later and is then refused. Where the system has no socket
    filters (Linux has), the queue is only made as short as it can be.
    """
    listener.listen(0)
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(drop_all)))
