"""What a rank does in the test of `batch_size: auto`: rank 1 has less memory than the others."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from kd.backends.cpu import CPU
from kd.setup.batch import largest


class Refusing(CPU):
    """A device that says so when it is full, as accelerators do; here the allocator refuses what cannot exist."""

    def free_mib(self) -> float:
        return math.inf


def main(argv: list[str]) -> None:
    backend = Refusing("fp32", 20.0, threads=1)
    backend.setup()
    limit = 9 if backend.rank == 1 else 100
    found = largest(lambda size: torch.empty(size if size <= limit else 2**60), 64, backend)
    (Path(argv[0]) / f"{backend.rank}.json").write_text(json.dumps([found.size, found.summary]))
    backend.close()
