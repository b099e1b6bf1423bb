"""h11's HTTP/1.1 parser with bounds on the work that a few bytes can cause."""

from __future__ import annotations

import re
from typing import Any

import h11

from kd.serve.limits import Limits

END_OF_HEADERS = re.compile(rb"\n\r?\n")
FREE_CHUNKS = 64


class Parser(h11.Connection):
    """The server's side of one connection.

    h11 is written in Python: a header line costs it about 2 microseconds and a chunk about 15, however small they are.
    So 2 MB/s of one-byte chunks keep a core busy. Header lines are counted before they are parsed, and a chunked body
    must have chunks of some size.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(h11.SERVER, limits.max_header_bytes)
        self._limits = limits
        self._chunks = self._bytes = 0

    @property
    def pipelined(self) -> bool:
        """Whether more bytes came after a whole request that is not answered yet."""
        return self.their_state in (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL) and bool(self.trailing_data[0])

    def next_event(self) -> Any:
        """Return h11's next event.

        Raises:
            h11.RemoteProtocolError: no HTTP, too many header lines, or too many small chunks.
        """
        if self.their_state is h11.IDLE:
            headers = END_OF_HEADERS.split(self.trailing_data[0], 1)[0]
            if headers.count(b"\n") > self._limits.max_header_lines:
                raise h11.RemoteProtocolError("too many header lines", error_status_hint=431)
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // self._limits.min_chunk:
                raise h11.RemoteProtocolError("too many small chunks")
        elif isinstance(event, h11.EndOfMessage) and len(event.headers) > self._limits.max_header_lines:
            raise h11.RemoteProtocolError("too many trailer lines")
        return event
