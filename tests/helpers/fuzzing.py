"""What the fuzz tests of folders and of the endpoint share."""

from __future__ import annotations

import io
import os

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from PIL import Image

GIVEN = os.environ.get("KD_FUZZ")
"""So many random inputs a test; without it the same few each time."""


def fuzz(few: int) -> tuple[int, settings]:
    """Return how many inputs a test tries, and its decorator."""
    count = int(GIVEN or few)
    return count, settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=not GIVEN,
        suppress_health_check=list(HealthCheck),
    )


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """Flip a bit, cut, or put some bytes in place of others."""
    places = st.integers(0, len(content) - 1)

    def flip(at: int, bit: int) -> bytes:
        return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]

    def put(at: int, gone: int, new: bytes) -> bytes:
        return content[:at] + new + content[at + gone :]

    flips = st.builds(flip, places, st.integers(0, 7))
    return st.one_of(
        flips,
        places.map(lambda end: content[:end]),
        st.builds(put, places, st.integers(0, 40), st.binary(max_size=40)),
    )


def texts(*likely: str) -> st.SearchStrategy[str]:
    """Draw text, some of it half of a surrogate pair, legal in JSON but not UTF-8."""
    return st.one_of(
        st.text(st.characters(), max_size=16), st.sampled_from(["", "\ud800", *likely])
    )


def junk(scalars: st.SearchStrategy, keys: st.SearchStrategy) -> st.SearchStrategy:
    """Draw anything that JSON has."""
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)
        ),
        max_leaves=8,
    )


def image(kind: str, mode: str = "RGB", **options: object) -> bytes:
    """Return a file of 32 x 24 pixels of noise."""
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(file, kind, **options)
    return file.getvalue()


IMAGES = {
    "jpeg": image("JPEG"),
    "progressive": image("JPEG", progressive=True),
    "png": image("PNG"),
    "palette": image("PNG", "P"),
    "webp": image("WEBP"),
    "lossless": image("WEBP", lossless=True),
}
