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
    """Return the networks whose matrices have these sizes, up to one or two classifiers; a name may come twice."""
    sizes = signature(tensors)
    index = dict(line.split(" ", 1) for line in INDEX.read_text(encoding="utf-8").splitlines())
    matrices = [size for name, size in sizes.items() if tensors[name].ndim == 2]
    totals = [sum(sizes.values()) - without for without in [0, *matrices, *(2 * size for size in matrices)]]
    return [name for total in totals for name in index.get(f"{total % 2**64:016x}", "").split()]


def signature(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the hash of the size of each matrix and kernel."""
    # Vectors and position tables are left out: they depend on the family's format and on the image size.
    kept = {n: t for n, t in tensors.items() if t.ndim in (2, 4, 5) and not re.search("_pos|pos_|position", n)}
    return {name: _hash(tensor.numel()) for name, tensor in kept.items() if tensor.shape[0] > 1}


def _hash(number: int) -> int:
    return int.from_bytes(hashlib.blake2b(str(number).encode(), digest_size=8).digest(), "big")
