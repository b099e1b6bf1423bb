"""uvicorn's connections and server with limits on hostile clients, health checks under load, and a clean shutdown."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from kd.deploy.serve.limits import PROBLEM, Limits, Problem
from kd.deploy.serve.service import Service

log = logging.getLogger("kd.serve")
READ_SIZE = 65_536  # bytes per read, which limits the parser's memory
DISCARD_SECONDS = 1.0  # seconds in which a refused client may read its response before the connection is cut
HEALTH_CHECK, HEALTH_BYTES = b"GET /ping ", 2048  # first bytes and length of a health check; chosen: it fits one read
SETTLE_SECONDS, SETTLE_CHECKS = 1.0, 10  # at shutdown: seconds to wait for responses to be sent, and between checks
ASGI = Callable[..., Any]
END_OF_HEADERS = re.compile(rb"\n\r?\n")
REQUEST_LINE, ABSOLUTE = re.compile(rb"[A-Z]{3,20} \S"), re.compile(rb"https?://[^/?]*", re.IGNORECASE)
FREE_CHUNKS = 64  # number of chunks of a body that may be smaller than `Limits.min_chunk`


class RequestParser(h11.Connection):
    """h11's parser of one connection, with limits on CPU time per byte received.

    h11 is written in Python. It needs time for every header line and every chunk, however small: 2 MB/s of one-byte
    chunks keep a core busy. So header lines are counted before they are parsed, and chunks must have a mean size.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(h11.SERVER, limits.max_header_bytes)
        self._limits = limits
        self._chunks = self._bytes = 0
        self.problem = Problem(400, "This is not an HTTP request.")  # the response if `next_event` raises

    @property
    def pipelined(self) -> bool:
        """Whether bytes of another request arrived before this response was sent."""
        return self.their_state in (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL) and bool(self.trailing_data[0])

    def next_event(self) -> Any:
        """Return h11's next event; RemoteProtocolError also for too many header lines, trailers or small chunks."""
        if self.their_state is h11.IDLE:
            self._check_head(END_OF_HEADERS.split(self.trailing_data[0], 1)[0])
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 501:
                self.problem = Problem(501, "This transfer coding is not supported. Allowed is chunked.")
            raise
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            if absolute := ABSOLUTE.match(event.target):  # a server must accept this form (RFC 9112 3.2.2)
                path = event.target[absolute.end() :]
                event = h11.Request(
                    method=event.method, headers=event.headers, http_version=event.http_version,
                    target=path if path.startswith(b"/") else b"/" + path,
                )  # fmt: skip
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // self._limits.min_chunk:
                self._reject(400, f"The chunks of the body have less than {self._limits.min_chunk} bytes on average.")
        elif isinstance(event, h11.EndOfMessage) and len(event.headers) > self._limits.max_header_lines:
            self._reject(431, f"The request has more than {self._limits.max_header_lines} trailer lines.")
        return event

    def _check_head(self, head: bytes) -> None:
        most, lines = self._limits.max_header_bytes, self._limits.max_header_lines
        if head.count(b"\n") > lines:
            self._reject(431, f"The request has more than {lines} header lines.")
        if len(head) > most and b"\n" in head[:most]:
            self._reject(431, f"The header of the request is longer than {most} bytes.")
        if len(head) > most and REQUEST_LINE.match(head):
            self._reject(414, f"The target of the request is longer than {most} bytes.")

    def _reject(self, status: int, detail: str) -> NoReturn:
        self.problem = Problem(status, detail)
        raise h11.RemoteProtocolError(detail)


@dataclass(frozen=True, slots=True)
class Shared:
    """The shared state of a server's connections."""

    limits: Limits
    health_only: ASGI  # the application for connections beyond `Limits.max_connections`
    refused: Callable[[Problem], str]  # counts and logs requests that reach no application; returns the request's id
    spare: dict[Connection, None] = field(default_factory=dict)  # the open spare connections, oldest first
    _jobs: deque[Callable[[], None]] = field(default_factory=deque)

    def parse_later(self, job: Callable[[], None]) -> None:
        """Queues parsing jobs: one job per iteration of the event loop, first in, first out.

        asyncio reads every ready connection in one iteration, and a health check takes about five iterations. h11 needs
        85 ms for 64 KiB of trailer lines, so 500 such connections would delay a health check by seconds.
        """
        self._jobs.append(job)
        if len(self._jobs) == 1:
            asyncio.get_running_loop().call_soon(self._parse_next)

    def _parse_next(self) -> None:
        try:
            self._jobs[0]()
        finally:
            self._jobs.popleft()
            if self._jobs:
                asyncio.get_running_loop().call_soon(self._parse_next)


class Connection(H11Protocol):
    """uvicorn's connection with deadlines for reading and writing, and a limit on the number of connections.

    uvicorn closes a connection that is idle between two requests. It has no deadline for the first byte, for the rest
    of the headers, or for a client that does not read its response.

    A connection beyond the limit becomes a spare connection. It serves health checks, sends 503 to everything else, and
    closes after one response. So a load balancer still sees a live server when clients hold all other connections.
    """

    def __init__(self, *args: Any, shared: Shared, **named: Any) -> None:
        super().__init__(*args, **named)
        self.shared, self.limits = shared, shared.limits
        self.conn = RequestParser(self.limits)
        self._spare = False
        self._received = bytearray()
        self._discarding = False
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_SIZE  # asyncio's default is 256 KiB; h11 parses that many trailer bytes in 260 ms
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
        """Keep bytes until it is this connection's turn to parse. Health checks do not wait."""
        if self._discarding:
            return
        waiting = bool(self._received)
        self._received += data
        if waiting:
            return
        if data.startswith(HEALTH_CHECK) and len(data) < HEALTH_BYTES:
            self._parse_received()
        else:
            self.transport.pause_reading()
            self.shared.parse_later(self._parse_received)

    def _parse_received(self) -> None:
        """Parse the bytes. A request that has begun must send its headers before the deadline."""
        data = bytes(self._received)
        self._received.clear()
        if self._discarding or self.transport.is_closing():
            return
        before = self.cycle
        idle = before is None or before.response_complete
        if idle and self._read_timer is None:
            self._start_reading()
        super().data_received(data)
        if self.cycle is not before and not self._discarding:
            self._stop_reading()
        if not self.flow.read_paused:
            self.transport.resume_reading()

    def handle_events(self) -> None:
        """Handle parsed events. A pipelining client gets one response and must reconnect, which HTTP allows."""
        super().handle_events()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and (self._spare or self.conn.pipelined):
            cycle.keep_alive = False
            if CLOSE_HEADER not in self.headers:  # as if the client had sent it: uvicorn sends it back
                self.headers.append(CLOSE_HEADER)

    def pause_writing(self) -> None:
        """Start the deadline for a client that does not read its response."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading()
        self.resume_writing()
        self.shared.spare.pop(self, None)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Respond to rejected input with a problem document."""
        problem, body = self.conn.problem, self.conn.problem.body
        headers = {"content-type": PROBLEM, "content-length": str(len(body)), "connection": "close"}
        headers["x-request-id"] = self.shared.refused(problem)
        response = h11.Response(status_code=problem.status, headers=list(headers.items()))
        with suppress(h11.LocalProtocolError):  # a response has already begun: only close
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the handler stops waiting for the rest of the body
            self.cycle.message_event.set()
        self._discard()

    def _discard(self) -> None:
        """Close for writing and discard input for a second. Closing with unread input would discard the response."""
        self._stop_reading()
        self._discarding = True
        self.transport.write_eof()
        self._read_timer = self.loop.call_later(DISCARD_SECONDS, self.transport.abort)

    def shutdown(self) -> None:
        """Close the connection. After a refusal nothing more may be sent: h11 would raise."""
        if self._discarding:
            self.transport.close()
        else:
            super().shutdown()

    def _start_reading(self) -> None:
        self._read_timer = self.loop.call_later(self.limits.header_seconds, self._header_timeout)

    def _stop_reading(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _header_timeout(self) -> None:
        self._read_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class DrainingServer(uvicorn.Server):
    """uvicorn's server with a shutdown that fails health checks first and serves all accepted connections."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self._drain_seconds = 0.0

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Drain on SIGTERM: a load balancer sends requests until it sees failing health checks. End on SIGINT."""
        if sig == signal.SIGINT:
            self._drain_seconds = 0.0
        elif self.service.ready and not self.should_exit:
            self._drain_seconds = self.service.limits.drain_seconds
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """Fail health checks, drain, accept no new connections, serve all accepted ones, stop."""
        self.service.draining = True
        log.info("ending: health checks fail, the port closes in %g s", self._drain_seconds)
        begin = time.monotonic()
        while time.monotonic() < begin + self._drain_seconds:
            await asyncio.sleep(SETTLE_SECONDS / SETTLE_CHECKS)
        log.info("ending: %d requests are in progress", self.service.in_flight)
        connections: Any = self.server_state.connections
        queued = [connection for listener in sockets or [] for connection in _accept_queue(listener)]
        for server in self.servers:
            server.close()
        for connection in queued:
            await asyncio.get_running_loop().connect_accepted_socket(self._connection, connection)
        for _ in range(SETTLE_CHECKS):
            # First wait: asyncio may not have announced a connection yet.
            await asyncio.sleep(SETTLE_SECONDS / SETTLE_CHECKS)
            if all(connection.cycle is not None for connection in connections):
                break
        await super().shutdown(sockets)

    def _connection(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        return kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def _accept_queue(listener: socket.socket) -> list[socket.socket]:
    """Accept every connection in a listener's queue: closing the listener would reset them."""
    accepted = []
    with suppress(BlockingIOError):
        while True:
            connection, _ = listener.accept()
            connection.setblocking(False)
            accepted.append(connection)
    return accepted
