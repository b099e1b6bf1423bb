"""AWS Trn2 and Trn3: native TorchNeuron (torch-neuronx >= 2.13, Neuron SDK >= 2.33).
NEVER RUN on hardware.

torch-neuronx up to 2.9 has the same package name but is based on torch_xla: use `kind:
xla` for it.
"""

import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch

from kd.core.errors import BackendError, MissingExtra
from kd.core.facts import BackendFacts
from kd.core.facts import NoOptions as Options
from kd.parts.backends._ddp import DDPBackend

facts = BackendFacts(
    compiles=True, muon=False, instances=("ml.trn",), chosen_on=("ml.trn",)
)


class Neuron(DDPBackend):
    """Train on one NeuronCore per process."""

    kind = "neuron"
    init = "neuron"

    @property
    def auto_mode(self) -> str:
        """The compiler's default precision; never measured."""
        return "bf16+unfused"

    def optimizer(
        self,
        groups: Iterable[dict[str, Any]],
        cls: type[torch.optim.Optimizer],
        zero: bool,
        **options: Any,
    ) -> torch.optim.Optimizer:
        if zero and self.world_size > 1:
            wrong = "is true, but has never been run on backend 'neuron'"
            allowed = "Allowed: false; Neuron compiles a broadcast for each shape"
            raise BackendError(
                "optimizer.zero", wrong, allowed, "Set optimizer.zero=false"
            )
        return super().optimizer(list(groups), cls, False, **options)


def build(options: Options, precision: str, timeout_seconds: float) -> Neuron:
    """Build the native Neuron backend; `setup` joins the world."""
    remedy = (
        "Install AWS's torch-neuronx for this torch on a Trn2 or Trn3 machine, or set"
        " backend.kind=cpu"
    )
    if importlib.util.find_spec("torch_neuronx") is None:
        wrong = "is 'neuron', but the package torch_neuronx is not installed"
        raise MissingExtra("backend.kind", wrong, "", remedy)
    if importlib.util.find_spec("torch_xla") is not None:
        wrong = (
            "is 'neuron', but the installed torch_neuronx is the older version, based"
            " on torch_xla"
        )
        allowed = "The native version needs torch 2.13 or newer"
        remedy = "Set backend.kind=xla, or install the native torch-neuronx"
        raise MissingExtra("backend.kind", wrong, allowed, remedy)
    # registers the device and the process group
    importlib.import_module("torch_neuronx")
    module = getattr(torch, "neuron", None)
    if module is None or not module.is_available():
        wrong = "is 'neuron', but this machine has no NeuronCore"
        raise BackendError("backend.kind", wrong, "Trn2 or Trn3", remedy)
    return Neuron(torch.device("neuron"), precision, timeout_seconds)
