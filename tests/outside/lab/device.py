"""A device of a laboratory, which lacks most of what others have. Its tensors lie on
the CPU, where tests can run.
"""

from dataclasses import dataclass

import torch

from kd.core.facts import BackendFacts
from kd.parts.backends._ddp import DDPBackend


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The YAML keys of the backend."""

    chip: int = 0
    """Number of the chip."""


facts = BackendFacts(
    inference=False,
    muon=False,
    own_zero="the laboratory's ZeRO",
    instances=("ml.lab",),
    chosen_on=("ml.lab",),
)


class Device(DDPBackend):
    """One process and one chip."""

    kind = "lab"
    init = "gloo"


def build(options: Options, precision: str, timeout_seconds: float) -> Device:
    """Build the backend."""
    return Device(torch.device("cpu"), precision, timeout_seconds)
