"""AWS P4d and P4de: NVIDIA GPUs over SageMaker's collectives library (smddp).

The library is a torch.distributed backend: importing it registers the name, and plain DDP runs over it. It knows no
second process group, no AVG, no object collectives and no barrier arguments; see `_ddp.py` and `_shards.py`.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from kd.backends._cuda import claim
from kd.backends._ddp import DDPBackend
from kd.errors import BackendError, MissingExtra
from kd.types import BackendFacts

FACTS = BackendFacts(gpu=True)
LIBRARY = "smdistributed.dataparallel.torch.torch_smddp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of the smddp backend."""

    fallback: Literal["none", "nccl", "gloo"] = "none"
    """What to do where the library is not installed. nccl: run on NVIDIA's own, say so and record it; gloo: the same
    on the CPU."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Where the tensors are. cpu: for a rehearsal without GPUs, on a stand-in of the library or on gloo."""
    tf32: bool = True
    """Let float32 products use TensorFloat-32."""

    def __post_init__(self) -> None:
        if self.fallback != "none" and (self.fallback == "nccl") != (self.device == "cuda"):
            raise ValueError(f"fallback {self.fallback} does not go with device {self.device} (nccl: cuda, gloo: cpu)")


class SMDDP(DDPBackend):
    """Train on one GPU a process over smddp, or on the CPU with a stand-in; or over what stands in its place."""

    def __init__(self, precision: str, timeout_seconds: float, options: Options, init: str = "smddp") -> None:
        super().__init__(torch.device("cpu"), precision, timeout_seconds)
        self.init = init
        self.kind = "smddp" if init == "smddp" else f"{init}, in place of smddp"  # the manifest records it
        if options.device == "cuda":
            self.device = claim(self.kind, self.local_rank, options.tf32)

    def check_divided(self, stages: int) -> None:
        """Refuse on smddp itself: FSDP2 gathers with all_gather_into_tensor; no document says that it sends."""
        if self.init != "smddp":
            return super().check_divided(stages)
        key, value = ("teacher.pipeline", str(stages)) if stages else ("teacher.shard", "true")
        why = "is not known to send from rank to rank"
        if not stages:
            why = "refuses the collective that gathers a sharded teacher (_allgather_base)"
        remedy = "Set backend.kind=cuda, or keep the teacher whole"
        raise BackendError(key, f"is {value}, but smddp {why}", "Backends that divide it: cpu, cuda, neuron", remedy)


def build(options: Options, precision: str, timeout_seconds: float) -> DDPBackend:
    """Build the smddp backend; `setup` joins the world.

    Raises:
        MissingExtra: the library is not installed and no fallback is allowed.
        BackendError: no GPU for this rank.
    """
    try:
        importlib.import_module(LIBRARY)
    except ImportError as error:
        if options.fallback == "none":
            raise MissingExtra(
                "backend.kind",
                f"is 'smddp', but the library {LIBRARY} cannot be imported ({error})",
                "AWS ships it in PyTorch containers for P4d and P4de, not on PyPI",
                "Run in such a container, or set backend.fallback=nccl, or backend.kind=cuda",
            ) from error
        text = f"backend: smddp is not installed; running on {options.fallback}, as backend.fallback allows"
        print(text, file=sys.stderr, flush=True)
        return SMDDP(precision, timeout_seconds, options, options.fallback)
    return SMDDP(precision, timeout_seconds, options)
