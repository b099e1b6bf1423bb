"""Randomness has no state: each seed is a hash of its purpose.

So no generator state is saved.
"""

import hashlib


def seed_from(*purpose: int | str) -> int:
    """Return a 63-bit seed, a pure function of a purpose.

    It is equal on all machines and Python versions.

    `seed_from(seed, "view", view, id)` seeds one augmented image, `seed_from(seed,
    "step", step, rank)` the dropout of one step. The words keep streams with equal
    numbers apart.
    """
    text = "\x1f".join(map(str, purpose))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def evenly_spaced(length: int, count: int) -> list[int]:
    """Return up to `count` evenly spaced ids.

    Listings are sorted by class, so the first images look alike.
    """
    count = min(count, length)
    return [number * length // count for number in range(count)]
