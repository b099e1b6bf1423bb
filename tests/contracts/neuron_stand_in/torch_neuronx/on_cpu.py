"""kd's own Neuron backend, built with all its checks, and then moved to the CPU, where
tensors can be.
"""

from dataclasses import replace

import torch

from kd.parts.backends.neuron import Neuron, Options, facts
from kd.parts.backends.neuron import build as build_neuron

assert facts.compiles
facts = replace(
    facts, complete=True
)  # its device is a CPU: the optimizer is fused, as in the run beside it


def build(options: Options, precision: str, timeout_seconds: float) -> Neuron:
    """Build the backend."""
    backend = build_neuron(options, precision, timeout_seconds)
    assert backend.device == torch.device("neuron")
    with backend.autocast():
        assert torch.is_autocast_enabled("neuron") == (precision == "bf16")
    backend.device = torch.device("cpu")
    return backend
