"""Columns of a listing: names in compressed blocks, and texts that many
images share.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

BLOCK = 128  # names per compressed block


class Names:
    """Names in compressed blocks: 4 to 20 bytes each, instead of 100 or more as
    objects.
    """

    # Every forked worker would also copy a list of strings page by page, since reading
    # an element writes its reference count. Reading one name takes some microseconds,
    # names in a row less than one each.

    def __init__(self, names: Iterable[bytes]) -> None:
        packed = bytearray()
        self._starts, self._count, self.size = array("q", [0]), 0, 0
        names = iter(names)
        while block := [*islice(names, BLOCK)]:
            joined = b"\0".join(block)  # file names have no zero byte
            packed += zlib.compress(joined, 1)
            self._starts.append(len(packed))
            self._count += len(block)
            self.size += len(joined) + bool(self.size)
        self._packed, self._last = bytes(packed), (-1, [b""])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> bytes:
        block, position = divmod(row, BLOCK)
        number, names = self._last
        if block != number:
            names = self._joined(block).split(b"\0")
            self._last = block, names
        return names[position]

    def __iter__(self) -> Iterator[bytes]:
        for block in range(len(self._starts) - 1):
            yield from self._joined(block).split(b"\0")

    def joined(self) -> Iterator[bytes]:
        """Yield all names, separated by zero bytes, in pieces; together they have
        `size` bytes.
        """
        for block in range(len(self._starts) - 1):
            yield b"\0" * bool(block) + self._joined(block)

    def _joined(self, block: int) -> bytes:
        return zlib.decompress(
            memoryview(self._packed)[self._starts[block] : self._starts[block + 1]]
        )


class Repeated(NamedTuple):
    """One value per image, such as its class name, when many images share it."""

    texts: list[Any]  # distinct values
    of: np.ndarray  # index of each image's value, int32 [N]

    @classmethod
    def of_each(cls, values: Iterable[Hashable]) -> Repeated:
        """Store the value of each image."""
        position: dict[Hashable, int] = {}
        of = np.fromiter(
            (position.setdefault(value, len(position)) for value in values), np.int32
        )
        return cls([*position], of)


def first_few(names: Sequence[str]) -> str:
    """Return up to eight names in a line."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
