"""The index of networks by the sizes of their matrices, `kd/models/shapes.txt`.

`python tools/shapes.py` writes it: networks of timm by their names, torchvision's as `torchvision.models:NAME`.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

INDEX = Path(__file__).with_name("shapes.txt")


def by_shapes(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the networks whose matrices have these sizes, up to one or two classifiers."""
    total, counts = signature(tensors)
    index = dict(line.split(" ", 1) for line in INDEX.read_text(encoding="utf-8").splitlines())
    left = [0, *counts, *(2 * one for one in counts)]
    found = (index.get(f"{(total - without) % 2**64:016x}", "") for without in left)
    return [name for names in found for name in names.split()]


def signature(tensors: Mapping[str, Tensor]) -> tuple[int, Counter[int]]:
    """Return the sum of hashes of all matrix and kernel sizes, and the hash of each matrix's size."""
    # Vectors and position tables are left out: they depend on the family's format and on the image size.
    sizes = {n: t for n, t in tensors.items() if t.ndim in (2, 4, 5) and t.shape[0] > 1 and "_pos" not in n}
    hashed = {n: _hash(t.numel()) for n, t in sizes.items() if "pos_" not in n and "position" not in n}
    return sum(hashed.values()), Counter(value for n, value in hashed.items() if sizes[n].ndim == 2)


def _hash(number: int) -> int:
    return int.from_bytes(hashlib.blake2b(str(number).encode(), digest_size=8).digest(), "big")
