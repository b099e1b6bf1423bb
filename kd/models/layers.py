"""The layers of a network, as timm groups them for fine-tuning, and its classifier."""

from __future__ import annotations

from typing import Any

from torch import nn

from kd.models.classifier import Network


def trained_network(student: Any) -> nn.Module:
    """Return the network of a student under the names that its author gave to its parameters."""
    network = getattr(student, "network", student)
    return network.inner if isinstance(network, Network) else network


def layer_groups(network: nn.Module, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
    """Return timm's parameter groups of a network: `lr_scale` is `layer_decay` to the power of a layer's depth.

    Frozen parameters are left out. timm's patterns say what does not decay, as in `kd.engine.optim.groups`.
    """
    from timm.optim import param_groups_layer_decay  # only where layers differ

    exempt = getattr(network, "no_weight_decay", set)()
    return param_groups_layer_decay(network, weight_decay, exempt, layer_decay=layer_decay)


def head_parameters(network: Any) -> list[nn.Parameter]:
    """Return the parameters of a network's classifiers; none where it does not say what they are."""
    found = network.get_classifier() if hasattr(network, "get_classifier") else ()
    modules = found if isinstance(found, (tuple, list)) else (found,)
    return [parameter for module in modules if isinstance(module, nn.Module) for parameter in module.parameters()]
