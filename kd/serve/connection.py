"""What uvicorn leaves open: connections that never send a request, and requests that arrive while it ends."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
import struct
import time
from contextlib import suppress
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kd.serve.limits import Limits
from kd.serve.problems import MEDIA_TYPE, Problem
from kd.serve.service import Service

ACCEPT_SECONDS, SETTLE_SECONDS = 0.2, 1.0
SO_ATTACH_FILTER, BPF_RETURN = 26, 0x06


class Connection(H11Protocol):
    """uvicorn's connection with a time for headers and a bound on how many there are.

    uvicorn closes a connection that idles between two requests, but waits for ever for the first byte and for the rest
    of a header.
    """

    limits: ClassVar[Limits] = Limits()
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # type: ignore[override]
        """Begin to wait for headers."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.abort()
            return
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Take bytes; a request that has begun must bring its headers in time."""
        before = self.cycle
        idle = before is None or before.response_complete
        if idle and self._patience is None:
            self._wait()
        super().data_received(data)
        if self.cycle is not before:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
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
        self.transport.close()

    def _wait(self) -> None:
        self._patience = self.loop.call_later(self.limits.header_seconds, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class DrainingServer(uvicorn.Server):
    """uvicorn that tells the load balancer first, then takes what already knocked, then ends."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

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
