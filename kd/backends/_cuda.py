"""Shared by `cuda` and `smddp`: one GPU per local rank."""

from __future__ import annotations

import torch

from kd.backends._ddp import DDPBackend
from kd.errors import BackendError


class CUDA(DDPBackend):
    """Train on one GPU per process over nccl."""

    kind = "cuda"
    init = "nccl"

    def __init__(self, precision: str, timeout_seconds: float, tf32: bool) -> None:
        super().__init__(torch.device("cuda", 0), precision, timeout_seconds)
        self.device = select_gpu(self.kind, self.local_rank, tf32)


def select_gpu(kind: str, local_rank: int, tf32: bool) -> torch.device:
    """Make this rank's GPU the current one and return it."""
    if local_rank >= torch.cuda.device_count():
        raise BackendError(
            "backend.kind",
            f"is '{kind}', but local rank {local_rank} finds {torch.cuda.device_count()} GPUs",
            "One process per GPU",
            "Start fewer processes, or set backend.kind=cpu",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    return device
