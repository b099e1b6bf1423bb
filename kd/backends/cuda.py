"""NVIDIA GPUs: one process a GPU over nccl."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kd.backends._ddp import DDPBackend
from kd.errors import BackendError


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of the CUDA backend."""

    tf32: bool = True
    """Let float32 products use TensorFloat-32."""


class CUDA(DDPBackend):
    """Train on one GPU a process."""

    kind = "cuda"
    init = "nccl"

    def __init__(self, precision: str, timeout_seconds: float, tf32: bool) -> None:
        super().__init__(torch.device("cuda", 0), precision, timeout_seconds)
        if self.local_rank >= torch.cuda.device_count():
            raise BackendError(
                "backend.kind",
                f"is 'cuda', but local rank {self.local_rank} finds {torch.cuda.device_count()} GPUs",
                "One process a GPU",
                "Start fewer processes, or set backend.kind=cpu",
            )
        self.device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(self.device)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32


def build(options: Options, precision: str, timeout_seconds: float) -> CUDA:
    """Build the CUDA backend; `setup` joins the world."""
    return CUDA(precision, timeout_seconds, options.tf32)
