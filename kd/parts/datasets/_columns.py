"""Store the columns of a listing: compressed names, and values that images share."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Hashable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

BLOCK = 128  # names per compressed block


class Names:
    """Store names in compressed blocks: 4 to 20 bytes each, not 100 or more."""

    # Every forked worker would also copy a list of strings page by page, since reading
    # an element writes its reference count. Reading one name takes some microseconds,
    # names in a row less than one each.

    def __init__(self, names: Iterable[bytes]) -> None:
        packed = bytearray()
        self._starts = array("q", [0])
        self._count = 0
        self.size = 0
        names = iter(names)
        while block := [*islice(names, BLOCK)]:
            joined = b"\0".join(block)  # file names have no zero byte
            packed += zlib.compress(joined, 1)
            self._starts.append(len(packed))
            self._count += len(block)
            self.size += len(joined) + bool(self.size)
        self._packed = bytes(packed)
        self._last_block = (-1, [b""])  # number and names of the block read last

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> bytes:
        block, position = divmod(row, BLOCK)
        last_block, names = self._last_block
        if block != last_block:
            names = self._unpack(block).split(b"\0")
            self._last_block = block, names
        return names[position]

    def __iter__(self) -> Iterator[bytes]:
        for block in range(len(self._starts) - 1):
            yield from self._unpack(block).split(b"\0")

    def joined_pieces(self) -> Iterator[bytes]:
        """Yield all names in pieces, separated by zero bytes: `size` bytes together."""
        for block in range(len(self._starts) - 1):
            yield b"\0" * bool(block) + self._unpack(block)

    def _unpack(self, block: int) -> bytes:
        return zlib.decompress(
            memoryview(self._packed)[self._starts[block] : self._starts[block + 1]]
        )


class Categorical(NamedTuple):
    """Hold one value per image, such as its class name, when many images share it."""

    categories: list[Any]  # distinct values
    codes: np.ndarray  # index of each image's value in `categories`, int32 [N]

    @classmethod
    def from_values(cls, values: Iterable[Hashable]) -> Categorical:
        """Store the value of each image."""
        code_of: dict[Hashable, int] = {}
        codes = np.fromiter(
            (code_of.setdefault(value, len(code_of)) for value in values), np.int32
        )
        return cls([*code_of], codes)
