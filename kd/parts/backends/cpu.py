"""Any machine: torch on the CPU, several processes over gloo."""

from dataclasses import replace

import torch
from pydantic import NonNegativeInt

from kd.core.facts import BackendFacts
from kd.core.host import cores, keep_freed_memory
from kd.core.keys import Keys, keys
from kd.parts.backends._ddp import DDPBackend


@keys
class Options(Keys):
    """Options of the CPU backend."""

    threads: NonNegativeInt = 0
    """torch's threads per rank. 0: this machine's cores divided by its ranks."""


class CPU(DDPBackend):
    """Train on the CPU."""

    kind = "cpu"
    init = "gloo"
    facts = BackendFacts(cpu=True, complete=True, threads=0)

    def __init__(self, precision: str, timeout_seconds: float, threads: int) -> None:
        super().__init__(torch.device("cpu"), precision, timeout_seconds)
        keep_freed_memory()
        # torchrun sets OMP_NUM_THREADS=1 for several ranks, which leaves most cores
        # idle
        torch.set_num_threads(threads or max(1, cores() // self.local_world_size))


def facts(options: Options) -> BackendFacts:
    """Return the backend's facts."""
    return replace(CPU.facts, threads=options.threads)


def build(options: Options, precision: str, timeout_seconds: float) -> CPU:
    """Build the CPU backend; `setup` joins the world."""
    return CPU(precision, timeout_seconds, options.threads)
