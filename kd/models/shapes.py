"""The index of networks by the sizes of their matrices, `kd/models/shapes.txt`.

`python tools/shapes.py` writes it: networks of timm by their names, torchvision's as `torchvision.models:NAME`.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

INDEX = Path(__file__).with_name("shapes.txt")


def by_shapes(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the networks whose matrices have these sizes, up to one or two classifiers."""
    sizes = signature(tensors)
    index = dict(line.split(" ", 1) for line in INDEX.read_text(encoding="utf-8").splitlines())
    matrices = {0, *(size for name, size in sizes.items() if tensors[name].ndim == 2)}
    keys = [key_of(sum(sizes.values()) - without * count) for count in (1, 2) for without in sorted(matrices)]
    return [name for key in dict.fromkeys(keys) for name in index.get(key, "").split()]


def signature(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the hash of the size of each matrix and kernel."""
    # Vectors and position tables are left out: they depend on the family's format and on the image size.
    kept = {n: t for n, t in tensors.items() if t.ndim in (2, 4, 5) and not re.search("_pos|pos_|position", n)}
    packed = {n: str(t.numel()).encode() for n, t in kept.items() if t.shape[0] > 1}
    return {n: int.from_bytes(hashlib.blake2b(size, digest_size=8).digest(), "big") for n, size in packed.items()}


def key_of(total: int) -> str:
    """Return the key of a sum of hashes in the index."""
    return f"{total % 2**64:016x}"
