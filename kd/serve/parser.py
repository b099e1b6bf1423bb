"""h11's HTTP/1.1 parser with limits on CPU time per byte received."""

from __future__ import annotations

import re
from typing import Any, NoReturn

import h11

from kd.serve.limits import Limits
from kd.serve.problems import Problem

END_OF_HEADERS = re.compile(rb"\n\r?\n")
FREE_CHUNKS = 64


class Parser(h11.Connection):
    """The server's side of one connection.

    h11 is written in Python. It needs time for every header line and every chunk, however small: 2 MB/s of one-byte
    chunks keep a core busy. So header lines are counted before they are parsed, and chunks must have a mean size.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(h11.SERVER, limits.max_header_bytes)
        self._limits = limits
        self._chunks = self._bytes = 0
        self.problem = Problem(400, "This is not an HTTP request.")
        """The answer to the request for which `next_event` raises."""

    @property
    def pipelined(self) -> bool:
        """Whether bytes of a next request arrived before this one was answered."""
        return self.their_state in (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL) and bool(self.trailing_data[0])

    def next_event(self) -> Any:
        """Return h11's next event.

        Raises:
            h11.RemoteProtocolError: invalid HTTP, too many header or trailer lines, or too many small chunks.
        """
        if self.their_state is h11.IDLE:
            headers = END_OF_HEADERS.split(self.trailing_data[0], 1)[0]
            if headers.count(b"\n") > self._limits.max_header_lines:
                self._reject(431, f"The request has more than {self._limits.max_header_lines} header lines.")
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // self._limits.min_chunk:
                self._reject(400, f"The chunks of the body have less than {self._limits.min_chunk} bytes on average.")
        elif isinstance(event, h11.EndOfMessage) and len(event.headers) > self._limits.max_header_lines:
            self._reject(431, f"The request has more than {self._limits.max_header_lines} trailer lines.")
        return event

    def _reject(self, status: int, detail: str) -> NoReturn:
        self.problem = Problem(status, detail)
        raise h11.RemoteProtocolError(detail)
