"""NVIDIA GPUs: one process per GPU over nccl."""

from __future__ import annotations

from dataclasses import dataclass

from kd.backends._cuda import CUDA


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of the CUDA backend."""

    tf32: bool = True
    """Use TensorFloat-32 in float32 matrix products."""


def build(options: Options, precision: str, timeout_seconds: float) -> CUDA:
    """Build the CUDA backend; `setup` joins the world."""
    return CUDA(precision, timeout_seconds, options.tf32)
