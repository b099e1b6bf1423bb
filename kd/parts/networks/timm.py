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
from kd.parts.networks._shared import columns, named

facts = NetworkFacts(trains=True)


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
    """Load the classifier, keeping only the rows of its last layer for the data's
    classes.
    """
    config_path = f"{spec.config_path}.classes"
    if options.classes and spec.config_path == "student":
        raise ModelError(
            config_path,
            "is set, but a student has the data's classes",
            "",
            "Leave it out",
        )
    if not (options.classes and spec.logits and spec.exact_head):
        return load(spec, image_size, features)
    made = load(replace(spec, classes=None), image_size, features)
    if spec.classes and made.classes == tuple(
        spec.classes
    ):  # it was fitted on the data's classes
        return made
    own = (
        () if made.classes[0] == "class_0" else made.classes
    )  # its outputs have no names
    names, pick = named(spec, made.num_classes, own, options.classes)
    head = made.network.get_classifier()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        raise ModelError(
            config_path,
            f"is set, but '{spec.model}' does not end in a linear layer",
            "",
            "Fit it",
        )
    for rows in columns(pick).values():
        head.weight = nn.Parameter(head.weight.detach()[rows])
        if head.bias is not None:
            head.bias = nn.Parameter(head.bias.detach()[rows])
        if len(rows) == made.num_classes:
            made.notes = (*made.notes, REORDERED)
    head.out_features = made.num_classes = len(names)
    made.classes = names
    return made
