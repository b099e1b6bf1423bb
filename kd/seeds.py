"""One rule for randomness: a seed is a hash of what it stands for, so nothing random has a state to save."""

from __future__ import annotations

import hashlib


def seed_from(*parts: int | str) -> int:
    """Return a 63-bit seed that is a pure function of `parts`, equal on every machine and Python.

    `seed_from(seed, "view", view, id)` is the seed of one augmented image, `seed_from(seed, "step", step, rank)` that
    of the dropout of one step. Names keep streams apart that share numbers.
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
