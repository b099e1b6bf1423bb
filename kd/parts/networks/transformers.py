"""A transformers model by folder, hub id or architecture: a classifier, a backbone, or
the image tower of CLIP and SigLIP.

An architecture, such as `vit`, is for a student that starts from random weights.
"""

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from kd.core.errors import ModelError
from kd.core.facts import NetworkFacts
from kd.core.keys import Keys, file_key, keys
from kd.models.spec import Spec
from kd.parts.networks import _hub_student as students
from kd.parts.networks import _towers as towers
from kd.parts.networks._processor import IMAGENET
from kd.parts.networks._shared import refuse_classes, select_classes

facts = NetworkFacts(trains=True, weights=True)

AUTO_CLASSIFIER = "AutoModelForImageClassification"
NO_IDENTITY = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "id2label",
    "label2id",
    "dtype",
    "torch_dtype",
)
"""Keys of a configuration on which no output depends."""


@keys
class Options(Keys):
    """Options that override the folder."""

    classes: str = file_key("")
    """Text file, one class per line: new names for all of the model's classes in the
    order of the logits, if the data's names differ from `id2label`; or, if the model
    has more classes, the names of `id2label` that stand for the data's classes, in the
    data's order.
    """


def build(
    options: Options, spec: Spec, image_size: int, features: Collection[str]
) -> towers.TowerClassifier:
    """Load the model with its own normalization and input size.

    A student gets the data's classes, and from scratch the data's size.
    """
    refuse_classes(spec, classes=options.classes)
    hub = towers.library(spec.config_path)
    if towers.names_architecture(spec, hub):
        spec = replace(spec, free_size=True)
    config = towers.read_config(spec, hub)
    stored = copy.deepcopy(config)
    is_student = spec.config_path == "student"
    if is_student:
        students.adapt(spec, hub, config, image_size)
    arguments, preparation = towers.preprocessing(spec, hub, config, image_size)
    vision = towers.vision_config(config)
    names: tuple[str, ...] = ()
    pick = None
    notes: tuple[str, ...] = ()
    if spec.logits and is_student:
        model = towers.load_model(spec, hub, AUTO_CLASSIFIER, config)
        names = tuple(spec.classes or ())
    elif spec.logits:
        model_names = _class_names(spec, config)
        model = towers.load_model(spec, hub, AUTO_CLASSIFIER, config)
        names, pick = select_classes(
            spec, len(config.id2label), model_names, options.classes
        )
    elif config.model_type in towers.IMAGE_TOWERS:
        class_name = towers.IMAGE_TOWERS[config.model_type]
        model = towers.load_model(spec, hub, class_name, vision)
    else:
        model = towers.load_model(spec, hub, "AutoModel", config)
    if is_student and spec.pretrained:
        students.require_pixels(spec, preparation)
        notes = students.load_weights(spec, model, stored)
    patch = getattr(vision, "patch_size", 0)
    if not isinstance(patch, int):
        patch = 0
    network = towers.TowerClassifier(
        towers.Tower(model, preparation.order, patch, pick),
        num_classes=len(names),
        classes=names,
        features=features,
        architecture=_architecture(config, preparation.order),
        **arguments,
    )
    network.preprocessing = preparation.preprocessing
    side = network.input_size
    if is_student and side != image_size:
        notes += (f"'{spec.model}' runs at its {side} px on images of {image_size} px",)
    network.notes = notes
    return network


def _class_names(spec: Spec, config: Any) -> list[str]:
    """Return the names of the model's classes; empty if they are only numbered."""
    if not any(towers.CLASSIFIER in name for name in config.architectures or []):
        kinds = ", ".join(config.architectures or [config.model_type])
        wrong = f"'{spec.model}' is a {kinds}, which has no classes"
        allowed = f"A model ...{towers.CLASSIFIER} for losses on logits"
        remedy = (
            "Take losses on features, such as cosine, or for CLIP and SigLIP"
            " teacher.kind=zero_shot"
        )
        raise ModelError(f"{spec.config_path}.model", wrong, allowed, remedy)
    exported = towers.read_exported(spec).get("problem_type")
    spec.require_meaning(getattr(config, "problem_type", None) or exported or "")
    names = [config.id2label[label] for label in sorted(config.id2label)]
    numbered = [f"LABEL_{label}" for label in range(len(names))]
    return [] if names == numbered else names


def _architecture(config: Any, order: tuple[int, ...]) -> dict[str, Any]:
    """Return what rebuilds a network: class, configuration, and channels in `order`."""
    architecture = {towers.EXPORTED: type(config).__name__, "config": _identity(config)}
    if order != IMAGENET.order:
        architecture["order"] = list(order)
    return architecture


def _identity(config: Any) -> dict[str, Any]:
    """Return the part of a configuration that outputs may depend on."""
    return {
        key: value
        for key, value in config.to_diff_dict().items()
        if key not in NO_IDENTITY
    }
