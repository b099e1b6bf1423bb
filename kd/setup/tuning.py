"""Fine-tuning: which parameters of a student move, and how fast each."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from kd.config.tuning import Tuning
from kd.engine.criterion import Distillation
from kd.errors import ModelError
from kd.models.layers import head_parameters, layer_groups, trained_network
from kd.optim import Frozen, groups, scaled
from kd.setup.recipe import StudentPlan


def tune(plan: StudentPlan, student: nn.Module) -> Frozen | None:
    """Check that a student has the layers that are to learn otherwise, and freeze those that are named.

    Raises:
        ModelError: it has no layers, no classifier, or none of the parameters named.
    """
    tuning, where, network = plan.section.tuning, plan.tuned_by, trained_network(student)
    if tuning.layer_decay < 1 and not hasattr(network, "group_matcher"):
        wrong = f"is {tuning.layer_decay:g}, but '{plan.section.model}' does not say what its layers are"
        allowed = "A network of timm, or one with a method group_matcher as timm's"
        raise ModelError(f"{where}.layer_decay", wrong, allowed, f"Set {where}.layer_decay=1")
    if tuning.head_lr != 1 and not head_parameters(network):
        wrong = f"is {tuning.head_lr:g}, but '{plan.section.model}' names no classifier with parameters"
        allowed = "A classifier of timm, or a method get_classifier as timm's"
        raise ModelError(f"{where}.head_lr", wrong, allowed, f"Set {where}.head_lr=1")
    if not tuning.freeze:
        return None
    names = [name for name, _ in network.named_parameters()]
    for pattern in tuning.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            wrong = f"'{pattern}' is the name of no parameter of '{plan.section.model}'"
            raise ModelError(f"{where}.freeze", wrong, f"Names begin with {shown}", "Correct the pattern")
    frozen = Frozen(network, tuning.freeze, tuning.freeze_epochs)
    if len(frozen.parameters) == len(names):
        wrong = f"freezes all parameters of '{plan.section.model}'"
        raise ModelError(f"{where}.freeze", wrong, "Something must learn", "Leave the classifier out")
    return frozen


def parameter_groups(tuning: Tuning, weight_decay: float, module: Distillation) -> list[dict[str, Any]]:
    """Return the parameter groups of student and criterion for a torch optimizer."""
    network: nn.Module = getattr(module.student, "network", module.student)  # it knows what must not decay
    if tuning.layer_decay < 1:
        found = layer_groups(trained_network(module.student), weight_decay, tuning.layer_decay)
        found += groups([module.criterion], weight_decay)
    else:
        found = groups([network, module.criterion], weight_decay)
    if tuning.head_lr == 1:
        return found
    return scaled(found, dict.fromkeys(head_parameters(trained_network(module.student)), tuning.head_lr))
