"""Find pairs of images of the same photograph.

They are copies, re-encoded, cropped, mirrored, or have black bars. An album has a small
grey picture of each image without black bars (576 bytes), and 64-bit hashes of the
picture, 9 crops, and their mirror images. Three filters follow each other: equal bits
of a hash in one of 16 tables (time N log N), correlated low frequencies, and the
correlation of the aligned pictures. `audit_peers_*.csv` compares this with imagehash,
pdqhash and embeddings, which miss crops or list pairs of different photographs, and
with faiss in place of the tables: a few more pairs, six times the CPU time at 100,000
pictures, and 65 MB with an OpenMP of its own.

Legend: N images, V variants, P pairs, S = 24 pixels, G = 12 cells, F = 64 frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image

from kd.core.types import Decoded

SIDE = 24
"""Pixels per side of a small picture."""
WAVES = 8
"""Frequencies per side that are compared."""
SPANS = ((0.0, 1.0), (0.0, 0.9), (0.05, 0.95), (0.1, 1.0))
"""Intervals of a side that are searched: any crop to 90 % is within 1/40 of a side of
one of nine.
"""
CROPS = ((0, 0), *((y, x) for y in (1, 2, 3) for x in (1, 2, 3)))
"""Row and column index into `SPANS` of each variant.

The variants of the mirror image follow.
"""
MIRRORED = len(CROPS)
"""The first variant of the mirror image."""
UNKNOWN = -1
"""The variant of a pair whose crop is unknown."""
BLACK = 20
"""Largest grey level of a black bar, including JPEG noise."""
GRID = 160
"""Rows and columns tested for bars, nearest pixel each."""
LEAST_LEFT = 0.3
"""Smallest remaining share of a side: darker pictures are not cropped."""


class Album:
    """Small pictures of images, in the order of addition.

    Their pixels `luma`, uint8 [N, S, S]; `crc`, CRC-32 of the encoded bytes, uint32
    [N], 0: unknown; the number of their `split`, uint8 [N]; and the `id` in it, int64
    [N].
    """

    def __init__(self, capacity: int) -> None:
        """Reserve space for `capacity` images; memory is allocated on use."""
        numbers = [np.empty(capacity, kind) for kind in (np.uint32, np.uint8, np.int64)]
        self._columns = [np.empty((capacity, SIDE, SIDE), np.uint8), *numbers]
        self._show(0)

    def _show(self, count: int) -> None:
        self.luma, self.crc, self.split, self.id = (
            column[:count] for column in self._columns
        )

    def __len__(self) -> int:
        return len(self.id)

    def add(self, split: int, id: int, decoded: Decoded) -> None:
        """Add an image, given its id and split number.

        Four pixels of each of 24 x 24 cells are read.
        """
        image = decoded.image
        pixels = image.resize(
            (2 * SIDE, 2 * SIDE), Image.Resampling.NEAREST, box_inside_bars(image)
        )
        row = len(self)
        values = (np.asarray(pixels.reduce(2).convert("L")), decoded.crc, split, id)
        for column, value in zip(self._columns, values, strict=True):
            column[row] = value
        self._show(row + 1)


def box_inside_bars(image: Image.Image) -> tuple[float, float, float, float]:
    """Return the box inside black bars: left, top, right and bottom in pixels."""
    small = image.resize((GRID, GRID), Image.Resampling.NEAREST).convert("L")
    bright = small.point([255 * (grey > BLACK) for grey in range(256)])
    x0, y0, x1, y1 = bright.getbbox() or (0, 0, 0, 0)
    if min(x1 - x0, y1 - y0) < LEAST_LEFT * GRID:
        return 0, 0, image.width, image.height
    x = image.width / GRID
    y = image.height / GRID
    return x0 * x, y0 * y, x1 * x, y1 * y


class Pairs(NamedTuple):
    """Pairs of images of an album, by row. The second may show a part of the first."""

    first: np.ndarray
    second: np.ndarray
    variant: np.ndarray  # variant of the first that matches the second, or `UNKNOWN`
    score: np.ndarray  # a correlation, at most 1

    def take(self, rows: np.ndarray) -> Pairs:
        return Pairs(*(column[rows] for column in self))


def copies(album: Album) -> Pairs:
    """Return an album's pairs of the same photograph, each once, most similar first."""
    return same_photograph(album, candidates(album.luma))


TABLES = 16
"""Tables of hashes: a pair must agree in the bits of one of them."""
WINDOW = 16
"""Hashes compared with each in a table: of many equal ones others in each table."""
MOST_BITS = 14
"""Differing bits of 63 in a candidate pair.

It only preselects pairs for `ROUGHLY`, so it is generous.
"""
ROUGHLY = 0.8
"""Smallest correlation of the low frequencies of a candidate pair."""
_ROWS = 4096  # pictures per batch, some 10 MB as float32
_DULL = 0.5
"""Grey levels of a constant beside the frequencies: blank pictures are alike."""
_STABLE = np.array(
    [WAVES * v + u for v in range(WAVES) for u in range(WAVES) if 0 < u + v < WAVES]
)
"""The lower frequencies, whose signs change least."""


def candidates(luma: np.ndarray) -> Pairs:
    """Return pairs of pictures [N, S, S] whose low frequencies correlate.

    The first picture of a pair is taken as each of its variants.
    """
    pairs = similar_hashes(hashes(luma))
    for start in range(0, len(pairs.first), _ROWS):
        rows = slice(start, start + _ROWS)
        for variant in np.unique(pairs.variant[rows]):
            chunk = start + np.flatnonzero(pairs.variant[rows] == variant)
            first = spectra(luma[pairs.first[chunk]], int(variant))
            second = spectra(luma[pairs.second[chunk]], 0)
            pairs.score[chunk] = (first * second).sum(1)
    return pairs.take(np.flatnonzero(pairs.score >= ROUGHLY))


def hashes(luma: np.ndarray) -> np.ndarray:
    """Return the signs of each variant's low frequencies as 64 bits, uint64 [N, V].

    The pictures are [N, S, S].
    """
    hashes_NV = np.empty((len(luma), 2 * MIRRORED), np.uint64)
    for start in range(0, len(luma), _ROWS):
        rows = slice(start, start + _ROWS)
        for variant in range(2 * MIRRORED):
            signs = spectra(luma[rows], variant) > 0
            hashes_NV[rows, variant] = np.packbits(signs, axis=1).view(np.uint64)[:, 0]
    return hashes_NV


def similar_hashes(hashes_NV: np.ndarray) -> Pairs:
    """Return pairs whose hashes [N, V] differ in few bits, with a score of 0.

    A table sorts the images by some bits of their hashes: more bits for more images, so
    that few share all of them. A pair stands once, but for its variants: `packed`
    writes it as a number.
    """
    count = len(hashes_NV)
    rng = np.random.default_rng(0)
    bits = int(np.clip(np.ceil(np.log2(max(2, count))), 8, 24))
    hash_N = np.ascontiguousarray(hashes_NV[:, 0])
    packed = np.zeros(0, np.uint64)
    for _ in range(TABLES):
        chosen = np.isin(
            np.arange(WAVES * WAVES), rng.choice(_STABLE, bits, replace=False)
        )
        mask = np.packbits(chosen).view(np.uint64)[0]
        order = np.argsort(hash_N & mask, kind="stable")
        table = (hash_N & mask)[order]
        hits = [packed]
        for variant in range(hashes_NV.shape[1]):
            variant_N = hashes_NV[:, variant]
            start = np.searchsorted(table, variant_N & mask, "left")
            end = np.searchsorted(table, variant_N & mask, "right")
            surplus = np.maximum(1, end - start - WINDOW + 1)
            start += rng.integers(0, 1 << 30, count) % surplus
            for step in range(WINDOW):
                first = np.flatnonzero(start + step < end)
                second = order[start[first] + step]
                differing = _ones(variant_N[first] ^ hash_N[second])
                alike = (differing <= MOST_BITS) & (first != second)
                hits.append(_packed(first[alike], second[alike], variant))
        packed = np.unique(np.concatenate(hits))
    first = packed >> np.uint64(36)
    second = packed >> np.uint64(8) & np.uint64(2**28 - 1)
    variant = packed & np.uint64(255)
    score = np.zeros(len(packed), np.float32)
    return Pairs(
        first.astype(np.int64), second.astype(np.int64), variant.astype(np.int64), score
    )


def _packed(first: np.ndarray, second: np.ndarray, variant: int) -> np.ndarray:
    """Return each pair as a number; (a, b) equals (b, a) if neither is cropped."""
    if variant in (0, MIRRORED):
        first, second = np.sort([first, second], axis=0)
    return (
        first.astype(np.uint64) << np.uint64(36)
        | second.astype(np.uint64) << np.uint64(8)
        | np.uint64(variant)
    )


def _ones(bits: np.ndarray) -> np.ndarray:
    """Count the ones of each 64 bits (NumPy has a function for it since 2.0)."""
    bits = bits - (bits >> np.uint64(1) & np.uint64(0x5555555555555555))
    bits = (bits & np.uint64(0x3333333333333333)) + (
        bits >> np.uint64(2) & np.uint64(0x3333333333333333)
    )
    bits = bits + (bits >> np.uint64(4)) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return bits * np.uint64(0x0101010101010101) >> np.uint64(56)


def spectra(luma: np.ndarray, variant: int) -> np.ndarray:
    """Return the low frequencies of a variant of pictures [N, S, S].

    They are float32 [N, F] of length 1.
    """
    y, x = CROPS[variant % MIRRORED]
    pictures = luma[:, :, ::-1] if variant >= MIRRORED else luma
    vectors = (BASES[y] @ pictures.astype(np.float32) @ BASES[x].T).reshape(
        len(luma), WAVES * WAVES
    )
    vectors[:, 0] = _DULL  # in place of the mean brightness
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def frequencies(low: float, high: float) -> np.ndarray:
    """Return the low frequencies of a cosine transform over an interval of a side.

    They are float32 [8, S].
    """
    edges = (np.clip(np.arange(SIDE + 1) / SIDE, low, high) - low) / (high - low)
    k = np.arange(WAVES)[:, None]
    areas = np.where(
        k == 0, edges, np.sin(np.pi * k * edges) / np.maximum(np.pi * k, 1e-9)
    )
    return np.diff(areas, axis=1).astype(np.float32)


BASES = [frequencies(*span) for span in SPANS]

LEAST = 0.88
"""Smallest score of a pair."""
CELLS = 12
"""Compared cells per side: half a side, since a crop need not align with pixels."""
FLAT = 16.0
"""Variance of a picture below which it is blank, grey levels squared."""
FLAT_DETAIL = 2.0
"""The same for its detail."""
WIDE = (
    (0.0, 1.0),
    *(
        (s / 10, s / 10 + size)
        for size in (0.9, 0.8, 0.7)
        for s in range(11 - round(10 * size))
    ),
)
"""Intervals of a side tried if the crop is unknown."""
_CHUNK = 2048  # pairs per batch: 5 MB for one picture of each as float32


def same_photograph(album: Album, pairs: Pairs) -> Pairs:
    """Return the pairs whose aligned pictures, and their detail, correlate.

    Each pair is listed once, the most similar first.
    """
    scores = np.zeros(len(pairs.first))
    for variant in np.unique(pairs.variant):
        rows = np.flatnonzero(pairs.variant == variant)
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            scores[chunk] = _overlaid(
                album.luma[pairs.first[chunk]],
                album.luma[pairs.second[chunk]],
                int(variant),
            )
    order = np.argsort(-scores, kind="stable")
    similar = pairs._replace(score=scores).take(order[scores[order] >= LEAST])
    unordered = np.sort(np.stack([similar.first, similar.second]), axis=0)
    _, best = np.unique(unordered, axis=1, return_index=True)
    return similar.take(np.sort(best))


def _overlaid(first: np.ndarray, second: np.ndarray, variant: int) -> np.ndarray:
    """Return the best score [P] over alignments of pictures [P, S, S].

    The second pictures are aligned with crops of the first.
    """
    equal = (first == second).all((1, 2))  # also true for blank pictures
    pictures = (first[:, :, ::-1] if variant >= MIRRORED else first).astype(np.float32)
    full = cell_means(0.0, 1.0)
    target, target_detail = _standardized(full @ second.astype(np.float32) @ full.T)
    best = np.where(equal, 1.0, -1.0)
    for rows, columns in _alignments(variant):
        crop, detail = _standardized(
            cell_means(*rows) @ pictures @ cell_means(*columns).T
        )
        score = ((crop * target).sum((1, 2)) + (detail * target_detail).sum((1, 2))) / 2
        best = np.maximum(best, score)
    return best


def _standardized(pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures [P, G, G] and their detail, the difference from a blur.

    Each has mean 0 and length at most 1.
    """
    detail = pictures - _BLUR @ pictures @ _BLUR.T
    return _centred(pictures, FLAT), _centred(detail, FLAT_DETAIL)


def _centred(pictures: np.ndarray, flat: float) -> np.ndarray:
    """Return pictures [P, G, G] with mean 0 and length at most 1.

    They are shorter if their variance is near `flat`.
    """
    centred = pictures - pictures.mean((1, 2), keepdims=True)
    squares = (centred * centred).sum((1, 2), keepdims=True)
    return centred / np.sqrt(squares + flat * CELLS * CELLS)


def cell_means(low: float, high: float) -> np.ndarray:
    """Return the matrix of cell means over an interval of a side, float32 [G, S]."""
    edges = low + (high - low) * np.arange(CELLS + 1) / CELLS
    pixels = np.arange(SIDE + 1) / SIDE
    shared = np.minimum(edges[1:, None], pixels[1:]) - np.maximum(
        edges[:-1, None], pixels[:-1]
    )
    areas = np.clip(shared, 0, None)
    return (areas / areas.sum(1, keepdims=True)).astype(np.float32)


def _alignments(
    variant: int,
) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Yield intervals of rows and of columns of equal length, near a variant's crop."""
    y, x = (UNKNOWN, UNKNOWN) if variant == UNKNOWN else CROPS[variant % MIRRORED]
    for rows in _intervals_near(y):
        for columns in _intervals_near(x):
            if np.isclose(np.ptp(rows), np.ptp(columns)):
                yield rows, columns


def _intervals_near(span: int) -> list[tuple[float, float]]:
    """Return intervals of a side near one of `SPANS`; `UNKNOWN`: anywhere."""
    if span == UNKNOWN:
        return list(WIDE)
    low, high = SPANS[span]
    middle = low / (1 - high + low) if span else 0.5
    intervals = []
    for size in (0.9, 0.85) if span else (1.0, 0.95):
        starts = {
            float(np.clip(middle * (1 - size) + shift, 0, 1 - size))
            for shift in (-0.025, 0.0, 0.025)
        }
        intervals += [(start, start + size) for start in sorted(starts)]
    return intervals


_BAND = (np.abs(np.subtract.outer(np.arange(CELLS), np.arange(CELLS))) <= 1).astype(
    np.float32
)
_BLUR = _BAND / _BAND.sum(1, keepdims=True)
