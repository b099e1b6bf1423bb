"""NVIDIA GPUs: one process per GPU over nccl."""

import torch

from kd.core.facts import BackendFacts
from kd.core.keys import Keys, keys
from kd.parts.backends._ddp import DDPBackend, select_gpu


@keys
class Options(Keys):
    """Options of the CUDA backend."""

    tf32: bool = True
    """Use TensorFloat-32 in float32 matrix products."""
    cudnn_benchmark: bool = False
    """Let cudnn time convolution algorithms for each new shape and keep the fastest.
    Runs may then differ in last bits.
    """


facts = BackendFacts(
    cuda=True, complete=True, instances=("ml.p", "ml.g"), chosen_on=("ml.p", "ml.g")
)


class CUDA(DDPBackend):
    """Train on one GPU per process."""

    kind = "cuda"
    init = "nccl"

    def __init__(
        self, precision: str, timeout_seconds: float, options: Options
    ) -> None:
        super().__init__(torch.device("cuda", 0), precision, timeout_seconds)
        self.device = select_gpu(self.kind, self.local_rank, options.tf32)
        torch.backends.cudnn.benchmark = options.cudnn_benchmark


def build(options: Options, precision: str, timeout_seconds: float) -> CUDA:
    """Build the CUDA backend; `setup` joins the world."""
    return CUDA(precision, timeout_seconds, options)
