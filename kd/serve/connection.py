"""uvicorn's connections and server, with deadlines for slow clients, health checks under load, and a clean shutdown."""

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
from kd.serve.loop_budget import LoopBudget
from kd.serve.parser import Parser
from kd.serve.problems import MEDIA_TYPE
from kd.serve.service import Service

ACCEPTED_AT_ONCE, QUEUE = 64, 1024
READ_SIZE = 65_536
DISCARD_SECONDS = 1.0
HEALTH_CHECKS, HEALTH_BYTES = (b"GET /ping ", b"GET /v2/health/"), 2048
ACCEPT_SECONDS, SETTLE_SECONDS = 0.2, 1.0
ASGI = Callable[..., Any]
SO_ATTACH_FILTER, BPF_RETURN = 26, 0x06


@dataclass(frozen=True, slots=True)
class Shared:
    """The state that all connections of a server share."""

    limits: Limits
    health_only: ASGI
    """The application for connections beyond `Limits.max_connections`."""
    spare: dict[Connection, None] = field(default_factory=dict)
    """The open spare connections, oldest first."""
    budget: LoopBudget = field(default_factory=LoopBudget)


class Connection(H11Protocol):
    """uvicorn's connection with deadlines for reading and writing, and a limit on the number of connections.

    uvicorn closes a connection that is idle between two requests. It has no deadline for the first byte, for the rest
    of the headers, or for a client that does not read its answer.

    A connection beyond the limit becomes a spare connection. It answers health checks, sends 503 to everything else,
    and closes after one answer. So a load balancer still sees a live server when clients hold all other connections.
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
        """Start the deadline for headers."""
        super().connection_made(transport)
        transport.max_size = READ_SIZE  # the default is 256 KiB; `_held` may keep this much
        transport.set_write_buffer_limits(high=0)  # call pause_writing as soon as bytes cannot be sent
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
        """Parse bytes now, or in a later iteration of the event loop if this one is long. Health checks do not wait."""
        if self._discarding:
            return
        if self._held is not None:
            self._held += data
        elif self.shared.budget.free or (data.startswith(HEALTH_CHECKS) and len(data) < HEALTH_BYTES):
            self.shared.budget.run(functools.partial(self._parse, data))
        else:
            self._held = bytearray(data)
            self.transport.pause_reading()
            self.shared.budget.wait(self._parse_held)

    def _parse_held(self) -> None:
        data, self._held = bytes(self._held or b""), None
        if not self.transport.is_closing():
            self._parse(data)
            if not self.flow.read_paused:
                self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        """Parse bytes. A request that has begun must send its headers before the deadline."""
        before = self.cycle
        idle = before is None or before.response_complete
        if idle and self._read_timer is None:
            self._start_reading()
        super().data_received(data)
        if self.cycle is not before and not self._discarding:
            self._stop_reading()

    def handle_events(self) -> None:
        """Handle parsed events. A pipelining client gets one answer and must reconnect, which HTTP allows."""
        super().handle_events()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and (self._spare or self.conn.pipelined):
            cycle.keep_alive = False

    def pause_writing(self) -> None:
        """Start the deadline for a client that does not read its answer."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the deadline: everything is sent."""
        super().resume_writing()
        self._stop_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers and forget the connection."""
        self._stop_reading()
        self._stop_writing()
        self.shared.spare.pop(self, None)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser rejects with a problem document."""
        problem, body = self.conn.problem, self.conn.problem.body
        headers = [
            (b"content-type", MEDIA_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        with suppress(h11.LocalProtocolError):  # an answer has already begun: only close
            for event in (
                h11.Response(status_code=problem.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the handler stops waiting for the rest of the body
            self.cycle.message_event.set()
        self._discard()

    def _discard(self) -> None:
        """Close for writing, and discard input for a second. Closing with unread input would discard the answer too."""
        self._stop_reading()
        self._discarding = True
        self.transport.write_eof()
        self._read_timer = self.loop.call_later(DISCARD_SECONDS, self.transport.abort)

    def _start_reading(self) -> None:
        self._read_timer = self.loop.call_later(self.limits.header_seconds, self._header_timeout)

    def _stop_reading(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _stop_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _header_timeout(self) -> None:
        self._read_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class DrainingServer(uvicorn.Server):
    """uvicorn's server with a shutdown that fails health checks first and answers all accepted connections."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen. asyncio uses `backlog` as queue length and as the number of accepts per loop iteration."""
        await super().startup(sockets)
        for opened in sockets or []:
            opened.listen(QUEUE)

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """Answer every connection in the accept queue, take no new ones, then stop."""
        self.service.draining = True
        logging.getLogger("kd.serve").info("ending: %d requests are being answered", self.service.in_flight)
        for opened in sockets or []:
            _drop_new_connections(opened)
        start = time.monotonic()
        while (waited := time.monotonic() - start) < SETTLE_SECONDS:
            connections: Any = self.server_state.connections
            if waited > ACCEPT_SECONDS and all(connection.cycle is not None for connection in connections):
                break
            await asyncio.sleep(ACCEPT_SECONDS / 10)
        await super().shutdown(sockets)


def _drop_new_connections(listener: socket.socket) -> None:
    """Let a listening socket drop every new connection attempt, and still accept those in its queue.

    Closing the socket at once would reset the connections in the queue, which may have sent a request. A client whose
    attempt is dropped tries again a second later and is then refused. Without socket filters (Linux has them) the queue
    is only made as short as possible.
    """
    listener.listen(0)
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(drop_all)))
