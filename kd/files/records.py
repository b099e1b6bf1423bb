"""Several processes may write files of numbered, checksummed records."""

import logging
import mmap
import os
import struct
import weakref
import zlib

log = logging.getLogger("kd")

FIRST = mmap.PAGESIZE  # bytes of the first read: a small record takes one request


class Stop:
    """This object tells whether and why writing has ended.

    Forked processes share it, so only one of them warns.
    """

    def __init__(self, name: str, consequence: str) -> None:
        self.name = name
        self.consequence = consequence
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    @property
    def reason(self) -> str:
        """Why writing has ended; "" while it goes on."""
        return self._page[:].rstrip(b"\0").decode()

    def set(self, reason: str) -> None:
        """End writing, and warn once."""
        if not self.reason:
            encoded = reason.encode()
            self._page[: len(encoded)] = encoded
            log.warning(f"{self.name} cannot be written ({reason}). {self.consequence}")


class Records:
    """A sparse file holds numbered records, each of at most `size` bytes.

    Each has its length and a checksum.

    Each record is one write, so a reader finds the old record, the new one, or a
    partial one that its checksum rejects. It uses `pread`: reading a mapped file that
    was truncated would end the process (SIGBUS).
    """

    HEAD = struct.Struct("<II")  # checksum and length

    def __init__(
        self, file: int, size: int, stop: Stop, label: str = "", align: int = 1
    ) -> None:
        """Use an open file.

        The label is part of the checksums; a record begins at a multiple of `align`
        bytes.
        """
        self.size = size
        self.stop = stop
        self.stride = record_bytes(size, align)
        self._file = file
        self._label = label
        self._close = weakref.finalize(self, os.close, file)

    def read(self, id: int) -> bytes | None:
        """Return the content of a record, or None if it is not intact or unreadable."""
        start = id * self.stride
        head = self.HEAD.size
        try:
            record = os.pread(self._file, min(self.stride, FIRST), start)
            if len(record) < head:
                return None
            checksum, length = self.HEAD.unpack_from(record)
            if not 0 < length <= self.size:
                return None
            content = record[head : head + length]
            missing = length - len(content)
            if missing > 0:
                content += os.pread(self._file, missing, start + head + len(content))
        except OSError:
            return None
        intact = len(content) == length and self._checksum(id, content) == checksum
        return content if intact else None

    def write(self, id: int, content: bytes) -> None:
        """Write a record.

        If the disk is full, warn once and stop writing; written records stay valid.
        """
        if self.stop.reason or len(content) > self.size:
            return
        record = self.HEAD.pack(self._checksum(id, content), len(content)) + content
        try:
            if os.pwrite(self._file, record, id * self.stride) < len(record):
                self.stop.set("it is full")
        except OSError as error:
            self.stop.set(error.strerror or str(error))

    def clear(self) -> None:
        os.ftruncate(self._file, 0)

    def _checksum(self, id: int, content: bytes) -> int:
        position = f"{self._label}:{id}:{len(content)}"
        return zlib.crc32(content, zlib.crc32(position.encode()))


def record_bytes(size: int, align: int = 1) -> int:
    """Return the bytes in the file of a record with up to `size` bytes of content."""
    return -(-(Records.HEAD.size + size) // align) * align
