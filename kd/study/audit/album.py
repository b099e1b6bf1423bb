"""A small grey picture of each image without black bars, 576 bytes, and 64 bits for it, 9 crops, and their mirrors.

Legend: N images, V variants, S = 24 pixels.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from kd.core.types import Decoded

SIDE, BITS = 24, 8  # pixels a side; frequencies a side of a hash
SPANS = ((0.0, 1.0), (0.0, 0.9), (0.05, 0.95), (0.1, 1.0))
"""Parts of a side that a hash covers: any crop to 90 % is within a fortieth of a side of one of nine."""
CROPS = ((0, 0), *((y, x) for y in (1, 2, 3) for x in (1, 2, 3)))
"""Rows and columns of `SPANS` of each variant; those of the mirror image follow."""
MIRRORED = len(CROPS)  # the first variant of the mirror image
BLACK, GRID, LEAST_LEFT = 20, 160, 0.3
"""Grey level up to which an edge is a black bar, with what JPEG adds; rows and columns that are looked at for bars, the
nearest pixel of each; share of a side that must be left: a picture that is darker than that is not cut."""
_CHUNK = 4096  # pictures at a time, some 10 MB as float32


class Album:
    """Small pictures of images, by the order in which they were added."""

    def __init__(self, most: int) -> None:
        """Make room for at most so many images; memory is taken as it is used."""
        self._luma = np.empty((most, SIDE, SIDE), np.uint8)
        self._crc, self._split, self._id = (np.empty(most, kind) for kind in (np.uint32, np.uint8, np.int64))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, split: int, id: int, decoded: Decoded) -> None:
        """Add an image of a split, by their numbers. Four pixels of each of 24 x 24 cells are looked at."""
        image = decoded.image
        small = image.resize((2 * SIDE, 2 * SIDE), Image.Resampling.NEAREST, inside(image)).reduce(2).convert("L")
        row, self._count = self._count, self._count + 1
        self._luma[row] = np.frombuffer(small.tobytes(), np.uint8).reshape(SIDE, SIDE)
        self._crc[row], self._split[row], self._id[row] = decoded.crc, split, id

    @property
    def luma(self) -> np.ndarray:
        """The pictures, uint8 [N, S, S]."""
        return self._luma[: self._count]

    @property
    def crc(self) -> np.ndarray:
        """CRC-32 of the encoded bytes, uint32 [N]; 0: nobody knows."""
        return self._crc[: self._count]

    @property
    def split(self) -> np.ndarray:
        """Number of the split of each image, uint8 [N]."""
        return self._split[: self._count]

    @property
    def id(self) -> np.ndarray:
        """Id in its split, int64 [N]."""
        return self._id[: self._count]


def inside(image: Image.Image) -> tuple[float, float, float, float]:
    """Return the part of an image within black bars: left, top, right and bottom in pixels."""
    small = image.resize((GRID, GRID), Image.Resampling.NEAREST).convert("L")
    bright = small.point([255 * (grey > BLACK) for grey in range(256)])
    left, top, right, bottom = bright.getbbox() or (0, 0, GRID, GRID)
    if min(right - left, bottom - top) < LEAST_LEFT * GRID:
        left, top, right, bottom = 0, 0, GRID, GRID
    x, y = image.width / GRID, image.height / GRID
    return left * x, top * y, right * x, bottom * y


def frequencies(low: float, high: float) -> np.ndarray:
    """Return the lowest frequencies of a cosine transform over a part of a side, float32 [8, S]."""
    edges = (np.clip(np.arange(SIDE + 1) / SIDE, low, high) - low) / (high - low)
    k = np.arange(BITS)[:, None]
    areas = np.where(k == 0, edges, np.sin(np.pi * k * edges) / np.maximum(np.pi * k, 1e-9))
    return np.diff(areas, axis=1).astype(np.float32)


BASES = [frequencies(*span) for span in SPANS]


def hashes(luma: np.ndarray) -> np.ndarray:
    """Return the signs of 63 low frequencies of each variant as 64 bits, uint64 [N, V]; luma [N, S, S]."""
    found, every = np.empty((len(luma), 2 * MIRRORED), np.uint64), np.concatenate(BASES)
    for start in range(0, len(luma), _CHUNK):
        rows = slice(start, start + _CHUNK)
        for mirrored, pictures in ((0, luma[rows]), (MIRRORED, luma[rows, :, ::-1])):
            both = every @ pictures.astype(np.float32) @ every.T
            for variant, (y, x) in enumerate(CROPS):
                part = both[:, BITS * y : BITS * (y + 1), BITS * x : BITS * (x + 1)]
                found[rows, mirrored + variant] = _signs(part)
    return found


def _signs(coefficients: np.ndarray) -> np.ndarray:
    bits = coefficients.reshape(len(coefficients), BITS * BITS) > 0
    bits[:, 0] = False  # the mean brightness
    return np.packbits(bits, axis=1).view(np.uint64)[:, 0]
