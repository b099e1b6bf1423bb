"""Find pairs of images of the same photograph: copies, re-encoded, cropped, mirrored, with black bars.

An album has a small grey picture of each image without black bars (576 bytes), and 64-bit hashes of the picture, 9
crops, and their mirror images. Three filters follow each other: equal bits of a hash in one of 16 tables (time N log
N), few different bits and similar low frequencies, and the correlation of the aligned pictures.

Legend: N images, V variants, P pairs, S = 24 pixels, G = 12 cells.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from PIL import Image

from kd.core.types import Decoded

SIDE, BITS = 24, 8  # pixels per side; frequencies per side of a hash
SPANS = ((0.0, 1.0), (0.0, 0.9), (0.05, 0.95), (0.1, 1.0))
"""Intervals of a side covered by hashes: any crop to 90 % is within 1/40 of a side of one of nine."""
CROPS = ((0, 0), *((y, x) for y in (1, 2, 3) for x in (1, 2, 3)))
"""Row and column index into `SPANS` of each variant; the mirror image's variants follow."""
MIRRORED = len(CROPS)  # the first variant of the mirror image
BLACK, GRID, LEAST_LEFT = 20, 160, 0.3
"""Largest grey level of a black bar, including JPEG noise; number of rows and columns tested for bars, nearest pixel
each; smallest remaining share of a side: darker pictures are not cropped."""
_HASHED = 4096  # pictures per batch, some 10 MB as float32


class Album:
    """Small pictures of images, in the order of addition.

    Their pixels `luma`, uint8 [N, S, S]; `crc`, CRC-32 of the encoded bytes, uint32 [N], 0: unknown; the number of
    their `split`, uint8 [N]; and the `id` in it, int64 [N].
    """

    def __init__(self, most: int) -> None:
        """Reserve space for `most` images; memory is allocated on use."""
        numbers = [np.empty(most, kind) for kind in (np.uint32, np.uint8, np.int64)]
        self._room = [np.empty((most, SIDE, SIDE), np.uint8), *numbers]
        self._show(0)

    def _show(self, count: int) -> None:
        self.luma, self.crc, self.split, self.id = (part[:count] for part in self._room)

    def __len__(self) -> int:
        return len(self.id)

    def add(self, split: int, id: int, decoded: Decoded) -> None:
        """Add an image, given its id and split number. Four pixels of each of 24 x 24 cells are read."""
        image = decoded.image
        small = image.resize((2 * SIDE, 2 * SIDE), Image.Resampling.NEAREST, inside(image)).reduce(2).convert("L")
        row, luma = len(self), np.frombuffer(small.tobytes(), np.uint8).reshape(SIDE, SIDE)
        for part, value in zip(self._room, (luma, decoded.crc, split, id), strict=True):
            part[row] = value
        self._show(row + 1)


def inside(image: Image.Image) -> tuple[float, float, float, float]:
    """Return the box inside black bars: left, top, right and bottom in pixels."""
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
    for start in range(0, len(luma), _HASHED):
        rows = slice(start, start + _HASHED)
        for mirrored, pictures in ((0, luma[rows]), (MIRRORED, luma[rows, :, ::-1])):
            both = every @ pictures.astype(np.float32) @ every.T
            for variant, (y, x) in enumerate(CROPS):
                part = both[:, BITS * y : BITS * (y + 1), BITS * x : BITS * (x + 1)]
                bits = part.reshape(len(part), BITS * BITS) > 0
                bits[:, 0] = False  # the mean brightness
                found[rows, mirrored + variant] = np.packbits(bits, axis=1).view(np.uint64)[:, 0]
    return found


TABLES, WINDOW, MOST_BITS = 16, 16, 14
"""Hash tables; neighbours compared per table; differing bits allowed of 63. These only preselect pairs for `ROUGHLY`
and `LEAST`, so they are generous: benchmarks/audit.py counts missed pairs."""
ROUGHLY, LEAST = 0.8, 0.88
"""Smallest correlation of low frequencies for a candidate pair; smallest score for a pair."""
CELLS = 12  # compared cells per side: half a picture's side, so that a crop need not align with pixels
FLAT, FLAT_DETAIL = 16.0, 2.0
"""Variances of a picture and of its detail below which it is blank; grey levels squared."""
WIDE = ((0.0, 1.0), *((s / 10, s / 10 + size) for size in (0.9, 0.8, 0.7) for s in range(11 - round(10 * size))))
"""Intervals of a side tried if the crop is unknown."""
_STABLE = np.array([BITS * v + u for v in range(BITS) for u in range(BITS) if 0 < u + v < BITS])
_CHUNK = 2048  # pairs per batch: 5 MB for one picture of each as float32


class Pairs(NamedTuple):
    """Pairs of images of an album, by row. The second may show a part of the first."""

    first: np.ndarray
    second: np.ndarray
    variant: np.ndarray  # variant of the first that matches the second; -1: unknown
    score: np.ndarray  # mean correlation of the pictures and of their detail, at most 1

    def take(self, rows: np.ndarray) -> Pairs:
        return Pairs(*(part[rows] for part in self))


def copies(album: Album) -> Pairs:
    """Return an album's pairs of the same photograph, each once, most similar first."""
    return closely(album, candidates(hashes(album.luma)))


def candidates(hashes_NV: np.ndarray) -> Pairs:
    """Return pairs whose hashes differ in few bits, with a score of 0.

    A table sorts the images by some bits of their hashes: more bits for more images, so that few share all of them. Of
    many equal ones `WINDOW` are compared, different ones in each table.
    """
    count, rng = len(hashes_NV), np.random.default_rng(0)
    bits = int(np.clip(np.ceil(np.log2(max(2, count))), 8, 24))
    plain, seen = np.ascontiguousarray(hashes_NV[:, 0]), np.zeros(0, np.uint64)
    for _ in range(TABLES):
        chosen = np.isin(np.arange(BITS * BITS), rng.choice(_STABLE, bits, replace=False))
        mask = np.packbits(chosen).view(np.uint64)[0]
        order = np.argsort(plain & mask, kind="stable")
        table, found = (plain & mask)[order], [seen]
        for variant in range(hashes_NV.shape[1]):
            own = hashes_NV[:, variant]
            start, end = (np.searchsorted(table, own & mask, side) for side in ("left", "right"))
            start += rng.integers(0, 1 << 30, count) % np.maximum(1, end - start - WINDOW + 1)
            for step in range(WINDOW):
                rows = np.flatnonzero(start + step < end)
                others = order[start[rows] + step]
                alike = (_ones(own[rows] ^ plain[others]) <= MOST_BITS) & (rows != others)
                found.append(_packed(rows[alike], others[alike], variant))
        seen = np.unique(np.concatenate(found))
    first, second, variant = seen >> np.uint64(36), seen >> np.uint64(8) & np.uint64(2**28 - 1), seen & np.uint64(255)
    return Pairs(first.astype(np.int64), second.astype(np.int64), variant.astype(np.int64), np.zeros(len(seen)))


def _packed(first: np.ndarray, second: np.ndarray, variant: int) -> np.ndarray:
    """Return each pair as a number; (a, b) equals (b, a) if the first is not cropped."""
    if variant in (0, MIRRORED):
        first, second = np.minimum(first, second), np.maximum(first, second)
    return first.astype(np.uint64) << np.uint64(36) | second.astype(np.uint64) << np.uint64(8) | np.uint64(variant)


def _ones(bits: np.ndarray) -> np.ndarray:
    """Count the ones of each 64 bits (NumPy has a function for it since 2.0)."""
    bits = bits - (bits >> np.uint64(1) & np.uint64(0x5555555555555555))
    bits = (bits & np.uint64(0x3333333333333333)) + (bits >> np.uint64(2) & np.uint64(0x3333333333333333))
    bits = bits + (bits >> np.uint64(4)) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return bits * np.uint64(0x0101010101010101) >> np.uint64(56)


def closely(album: Album, pairs: Pairs) -> Pairs:
    """Return the candidates that show the same photograph, each once, most similar first."""
    found = [pairs.take(np.zeros(0, np.int64))]
    for variant in np.unique(pairs.variant):
        rows = np.flatnonzero(pairs.variant == variant)
        for start in range(0, len(rows), _CHUNK):
            part = pairs.take(rows[start : start + _CHUNK])
            same = (album.luma[part.first] == album.luma[part.second]).all((1, 2))  # also true for blank pictures
            if variant >= 0:
                near = np.flatnonzero(same | (_roughly(album, part) >= ROUGHLY))
                part, same = part.take(near), same[near]
            part = part._replace(score=np.where(same, 1.0, _overlaid(album, part)))
            found.append(part.take(np.flatnonzero(part.score >= LEAST)))
    every = Pairs(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
    every = every.take(np.lexsort((every.variant, -every.score)))
    both = np.stack([np.minimum(every.first, every.second), np.maximum(every.first, every.second)])
    return every.take(np.sort(np.unique(both, axis=1, return_index=True)[1]))


def _pictures(album: Album, pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Return the pictures of pairs of one variant, float32 [P, S, S] twice."""
    first, second = (album.luma[rows].astype(np.float32) for rows in (pairs.first, pairs.second))
    return first[:, :, ::-1] if (pairs.variant >= MIRRORED).any() else first, second


def _roughly(album: Album, pairs: Pairs) -> np.ndarray:
    """Return the correlation of the low frequencies of pairs of one variant [P]."""
    y, x = CROPS[pairs.variant[0] % MIRRORED]
    first, second = _pictures(album, pairs)
    one, other = BASES[y] @ first @ BASES[x].T, BASES[0] @ second @ BASES[0].T
    one[:, 0, 0] = other[:, 0, 0] = 0  # the mean brightness
    return (one * other).sum((1, 2)) / np.sqrt((one * one).sum((1, 2)) * (other * other).sum((1, 2)) + 1e-6)


def _overlaid(album: Album, pairs: Pairs) -> np.ndarray:
    """Return the best score [P] of pairs of one variant, over alignments of the second with parts of the first."""
    first, second = _pictures(album, pairs)
    best = np.full(len(first), -1.0)
    if not len(first):
        return best
    full = cells(0.0, 1.0)
    other, other_detail = _standard(full @ second @ full.T)
    y, x = CROPS[pairs.variant[0] % MIRRORED] if pairs.variant[0] >= 0 else (-1, -1)
    for row in _near(y):
        rows = cells(*row) @ first
        for column in _near(x):
            if abs((row[1] - row[0]) - (column[1] - column[0])) < 1e-6:
                one, detail = _standard(rows @ cells(*column).T)
                score = ((one * other).sum((1, 2)) + (detail * other_detail).sum((1, 2))) / 2
                best = np.maximum(best, score)
    return best


def _standard(pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures [P, G, G] and their detail (difference from a blur), each with mean 0 and length at most 1."""
    found = []
    for part, flat in ((pictures, FLAT), (pictures - _BLUR @ pictures @ _BLUR.T, FLAT_DETAIL)):
        part = part - part.mean((1, 2), keepdims=True)
        found.append(part / np.sqrt((part * part).sum((1, 2), keepdims=True) + flat * CELLS * CELLS))
    return found[0], found[1]


def cells(low: float, high: float) -> np.ndarray:
    """Return the matrix of cell means over an interval of a side, float32 [G, S]."""
    edges, pixels = low + (high - low) * np.arange(CELLS + 1) / CELLS, np.arange(SIDE + 1) / SIDE
    shared = np.minimum(edges[1:, None], pixels[1:]) - np.maximum(edges[:-1, None], pixels[:-1])
    areas = np.clip(shared, 0, None)
    return (areas / areas.sum(1, keepdims=True)).astype(np.float32)


def _near(span: int) -> list[tuple[float, float]]:
    """Return intervals of a side near one of `SPANS`; -1: anywhere."""
    if span < 0:
        return list(WIDE)
    low, high = SPANS[span]
    found, middle = [], low / (1 - high + low) if span else 0.5
    for size in (0.9, 0.85) if span else (1.0, 0.95):
        starts = {float(np.clip(middle * (1 - size) + shift, 0, 1 - size)) for shift in (-0.025, 0.0, 0.025)}
        found += [(start, start + size) for start in sorted(starts)]
    return found


_BAND = (np.abs(np.subtract.outer(np.arange(CELLS), np.arange(CELLS))) <= 1).astype(np.float32)
_BLUR = _BAND / _BAND.sum(1, keepdims=True)
