"""A backend for tests: several processes on one device over gloo, which nccl
refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kd.parts.backends._ddp import DDPBackend


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The YAML keys of `kind: outside.shared_gpu`."""

    device: str = "cuda:0"
    """Of all ranks."""


class SharedGPU(DDPBackend):
    """Train on the same device as the other ranks."""

    kind = "shared_gpu"
    init = "gloo"


def build(options: Options, precision: str, timeout_seconds: float) -> SharedGPU:
    """Build the backend; `setup` joins the world."""
    return SharedGPU(torch.device(options.device), precision, timeout_seconds)
