"""Fine-tuning: which parameters of a student move, and how fast each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from kd.config.tuning import Tuning
from kd.core.errors import ModelError, raised
from kd.engine.criterion import Distillation
from kd.engine.optim import Frozen, groups, scaled
from kd.models.classifier import head_parameters, layer_groups, trained_network
from kd.setup.recipe import StudentPlan


def tune(plan: StudentPlan, student: nn.Module) -> Frozen | None:
    """Check that a student has the layers that are to learn otherwise, and freeze those that are named.

    Raises:
        ModelError: it has no layers, no classifier, or none of the parameters named.
    """
    tuning, where, network = plan.tuning, plan.tuned_by, trained_network(student)
    if tuning.layer_decay < 1:
        key, wrong = f"{where}.layer_decay", "does not say what its layers are"
        if hasattr(network, "group_matcher"):
            with _asked(key, plan.model, "group_matcher"):
                rates = {group["lr_scale"] for group in layer_groups(network, 0.0, tuning.layer_decay)}
            wrong = "" if len(rates) > 1 else "has one layer by its group_matcher"
        if wrong:
            allowed = "A network of timm, or one with a method group_matcher as timm's"
            wrong = f"is {tuning.layer_decay:g}, but '{plan.model}' {wrong}"
            raise ModelError(key, wrong, allowed, f"Set {key}=1")
    if tuning.head_lr != 1:
        key = f"{where}.head_lr"
        with _asked(key, plan.model, "get_classifier"):
            head = head_parameters(network)
        if not head:
            wrong = f"is {tuning.head_lr:g}, but '{plan.model}' names no classifier with parameters"
            raise ModelError(key, wrong, "A classifier of timm, or a method get_classifier as timm's", f"Set {key}=1")
    if not tuning.freeze:
        return None
    names = [name for name, _ in network.named_parameters()]
    for pattern in tuning.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            wrong = f"'{pattern}' is the name of no parameter of '{plan.model}'"
            raise ModelError(f"{where}.freeze", wrong, f"Names begin with {shown}", "Correct the pattern")
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    frozen = Frozen(network, tuning.freeze, tuning.freeze_epochs)
    if {id(parameter) for parameter in trained} <= {id(parameter) for parameter in frozen.parameters}:
        wrong = f"freezes all parameters of '{plan.model}'"
        raise ModelError(f"{where}.freeze", wrong, "Something must learn", "Leave the classifier out")
    return frozen


@contextmanager
def _asked(key: str, model: str, method: str) -> Iterator[None]:
    """Name the key for which a network's method was called, where that fails."""
    try:
        yield
    except Exception as error:  # whatever a method of somebody else raises
        wrong = f"needs {method} of '{model}', which fails: {raised(error)}"
        raise ModelError(key, wrong, "A method as timm's", f"Correct it, or set {key}=1") from error


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
