"""Any timm classifier: by name, from a folder that timm or `kd-export` wrote, or from
the hub.
"""

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from kd.core.errors import ModelError
from kd.core.facts import NetworkFacts
from kd.core.keys import Keys, file_key, keys
from kd.models.classifier import REORDERED, Classifier
from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.parts.networks._shared import columns, refuse_classes, select_classes

facts = NetworkFacts(trains=True, weights=True)


@keys
class Options(Keys):
    """Options for a model with more classes than the data."""

    classes: str = file_key("")
    """Text file of class names, one per line: names of all of a teacher's outputs in
    order, from which the data's classes are selected; or, if its folder has names,
    those that stand for the data's classes, in the data's order. Empty: the model's
    classes are the data's.
    """


def build(
    options: Options, spec: Spec, image_size: int, features: Collection[str]
) -> Classifier:
    """Load the classifier, keeping only the last layer's rows of the data's classes."""
    config_path = f"{spec.config_path}.classes"
    refuse_classes(spec, classes=options.classes)
    if not (options.classes and spec.logits and spec.exact_head):
        return load(spec, image_size, features)
    model = load(replace(spec, classes=None), image_size, features)
    # it was fitted on the data's classes
    if spec.classes and model.classes == tuple(spec.classes):
        return model
    is_nameless = model.classes[0] == "class_0"
    model_names = () if is_nameless else model.classes
    names, pick = select_classes(spec, model.num_classes, model_names, options.classes)
    head = model.network.get_classifier()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        wrong = f"is set, but '{spec.model}' does not end in a linear layer"
        raise ModelError(config_path, wrong, "", "Fit it")
    for rows in columns(pick).values():
        head.weight = nn.Parameter(head.weight.detach()[rows])
        if head.bias is not None:
            head.bias = nn.Parameter(head.bias.detach()[rows])
        if len(rows) == model.num_classes:
            model.notes = (*model.notes, REORDERED)
    head.out_features = model.num_classes = len(names)
    model.classes = names
    return model
