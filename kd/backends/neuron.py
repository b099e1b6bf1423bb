"""AWS Trn2 and Trn3: native TorchNeuron (torch-neuronx 2.13 or newer, Neuron SDK 2.33 or newer). NEVER RUN on hardware.

Not to be confused with the torch_xla based torch-neuronx up to 2.9 of the same package name, which is `kind: xla`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kd.backends._ddp import DDPBackend
from kd.errors import BackendError, MissingExtra
from kd.types import BackendFacts

FACTS = BackendFacts(compiles=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """No options."""


class Neuron(DDPBackend):
    """Train on one NeuronCore a process."""

    kind = "neuron"
    init = "neuron"
    fixed_mode = "bf16+unfused"
    """Each candidate would be compiled, for minutes."""

    def optimizer(
        self, groups: Iterable[dict[str, Any]], cls: type[torch.optim.Optimizer], zero: bool, **options: Any
    ) -> torch.optim.Optimizer:
        """Build the plain optimizer; ZeRO is refused until it has been run on this hardware."""
        if zero and self.world_size > 1:
            raise BackendError(
                "optimizer.zero",
                "is true, but has never been run on backend 'neuron'",
                "There each broadcast of another shape is compiled once",
                "Set optimizer.zero=false",
            )
        return super().optimizer(list(groups), cls, False, **options)


def build(options: Options, precision: str, timeout_seconds: float) -> Neuron:
    """Build the native Neuron backend; `setup` joins the world.

    Raises:
        MissingExtra: torch-neuronx is not installed, or it is the older one over torch_xla.
        BackendError: it is installed but offers no device.
    """
    remedy = "Install AWS's torch-neuronx for this torch on a Trn2 or Trn3 machine, or set backend.kind=cpu"
    if importlib.util.find_spec("torch_neuronx") is None:
        raise MissingExtra("backend.kind", "is 'neuron', but the package torch_neuronx is not installed", "", remedy)
    if importlib.util.find_spec("torch_xla") is not None:
        raise MissingExtra(
            "backend.kind",
            "is 'neuron', but the torch_neuronx installed is the older one, over torch_xla",
            "The native one begins with torch 2.13",
            "Set backend.kind=xla, or install the native torch-neuronx",
        )
    importlib.import_module("torch_neuronx")  # registers the device and the process group
    module = getattr(torch, "neuron", None)
    if module is None or not module.is_available():
        raise BackendError("backend.kind", "is 'neuron', but this machine has no NeuronCore", "Trn2 or Trn3", remedy)
    return Neuron(torch.device("neuron"), precision, timeout_seconds)
