"""AWS P4d and P4de: NVIDIA GPUs over SageMaker's collectives library (smddp).

The library is a torch.distributed backend: importing it registers its name, and plain
DDP uses it. It does not support a second process group, AVG, object collectives or
barrier arguments; see `_ddp.py` and `_optimizers.py`.
"""

import importlib
import logging
from typing import Literal

import torch
import torch.distributed as dist

from kd.core.errors import BackendError, MissingExtra, first_sentence
from kd.core.facts import BackendFacts
from kd.core.keys import Keys, keys
from kd.parts.backends._ddp import DDPBackend, select_gpu

LIBRARY = "smdistributed.dataparallel.torch.torch_smddp"


@keys
class Options(Keys):
    """Options of the smddp backend."""

    fallback: Literal["none", "nccl", "gloo"] = "none"
    """Fallback if the library is not installed. none: an error. nccl: NVIDIA's library,
    with a warning and an entry in the manifest. gloo: the same on the CPU.
    """
    device: Literal["cuda", "cpu"] = "cuda"
    """Device of the tensors. cpu: for tests without GPUs, on a stand-in of the library
    or on gloo.
    """
    tf32: bool = True
    """Use TensorFloat-32 in float32 matrix products."""

    def __post_init__(self) -> None:
        if self.fallback != "none" and (self.fallback == "nccl") != (
            self.device == "cuda"
        ):
            raise ValueError(
                f"fallback {self.fallback} does not go with device {self.device} (nccl:"
                " cuda, gloo: cpu)"
            )


class SMDDP(DDPBackend):
    """Train on one GPU per process over smddp or its fallback."""

    def __init__(
        self,
        precision: str,
        timeout_seconds: float,
        options: Options,
        init: str = "smddp",
    ) -> None:
        super().__init__(torch.device("cpu"), precision, timeout_seconds)
        self.init = init
        # the manifest records it
        self.kind = "smddp" if init == "smddp" else f"{init}, in place of smddp"
        if options.device == "cuda":
            self.device = select_gpu(self.kind, self.local_rank, options.tf32)

    def check_divided(self, stages: int) -> None:
        """Refuse stages, and sharding if this release refuses the all-gather."""
        # smddp documents no sends. AWS documents AllGather (P4d and P4de), but a
        # release of 2024 was reported to refuse it, so it is tested.
        if self.init == "smddp" and stages:
            wrong = f"is {stages}, but smddp has no documented point-to-point sends"
            allowed = "Backends that divide it: cpu, cuda, neuron"
            remedy = "Set backend.kind=cuda, or remove the key"
            raise BackendError("teacher.pipeline", wrong, allowed, remedy)
        super().check_divided(stages)
        if self.init != "smddp":
            return
        gathered = torch.empty(self.world_size, device=self.device)
        try:
            dist.all_gather_into_tensor(gathered, torch.ones(1, device=self.device))
        except RuntimeError as error:
            wrong = (
                "is true, but this release of smddp refuses the all-gather that"
                f" sharding needs ({first_sentence(error)})"
            )
            remedy = (
                "Install a newer release, set backend.kind=cuda, or teacher.shard=false"
            )
            raise BackendError(
                "teacher.shard", wrong, "AWS documents it for P4d and P4de", remedy
            ) from error


def facts(options: Options) -> BackendFacts:
    """Return the backend's facts."""
    return BackendFacts(
        cpu=options.device == "cpu",
        cuda=options.device == "cuda",
        complete=True,
        instances=("ml.p4d.", "ml.p4de.") if options.fallback == "none" else ("",),
    )


def build(options: Options, precision: str, timeout_seconds: float) -> DDPBackend:
    """Build the smddp backend; `setup` joins the world."""
    try:
        importlib.import_module(LIBRARY)
    except ImportError as error:
        if options.fallback == "none":
            wrong = (
                f"is 'smddp', but the library {LIBRARY} cannot be imported"
                f" ({first_sentence(error)})"
            )
            allowed = "AWS ships it in PyTorch containers for P4d and P4de, not on PyPI"
            remedy = (
                "Run in such a container, or set backend.fallback=nccl, or"
                " backend.kind=cuda"
            )
            raise MissingExtra("backend.kind", wrong, allowed, remedy) from error
        logging.getLogger("kd").warning(
            "backend: smddp is not installed; running on %s, as backend.fallback"
            " allows",
            options.fallback,
        )
        return SMDDP(precision, timeout_seconds, options, options.fallback)
    return SMDDP(precision, timeout_seconds, options)
