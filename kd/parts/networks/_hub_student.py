"""Adapt a transformers model to the data that a student learns: classes and size."""

from typing import Any

import torch
from torch import nn

from kd.core.errors import ModelError
from kd.core.text import nfc
from kd.models.spec import Spec
from kd.parts.networks import _towers as towers
from kd.parts.networks._shared import refuse_classes

CLASS_KEYS = ("num_labels", "id2label", "label2id")


def adapt(spec: Spec, hub: Any, config: Any, image_size: int) -> None:
    """Set a configuration's classes to the data's, and its image size if it is free.

    Raises:
        ModelError: the architecture is not one of images, or `args` set its classes.
    """
    refuse_classes(spec, **{f"args.{key}": spec.args.get(key) for key in CLASS_KEYS})
    _require_images(spec, hub, config)
    vision = towers.vision_config(config)
    size = getattr(vision, "image_size", None)
    given = {**spec.args, **spec.args.get("vision_config", {})}
    if spec.free_size and size is not None and "image_size" not in given:
        vision.image_size = image_size if isinstance(size, int) else [image_size] * 2
    if spec.classes:
        config.num_labels = len(spec.classes)
        config.id2label = dict(enumerate(spec.classes))
        config.label2id = {name: label for label, name in enumerate(spec.classes)}


def _require_images(spec: Spec, hub: Any, config: Any) -> None:
    mapping = hub.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if not spec.logits:
        mapping = hub.MODEL_FOR_IMAGE_MAPPING
    kind = config.model_type
    is_tower = not spec.logits and kind in towers.IMAGE_TOWERS
    if type(config) in mapping or is_tower:
        return
    kinds = sorted({listed.model_type for listed in mapping})
    wrong = f"'{spec.model}' is a {kind}, of which transformers has no image classifier"
    if not spec.logits:
        wrong = f"'{spec.model}' is a {kind}, which has no features of images"
    allowed = f"One of: {', '.join(kinds)}"
    raise ModelError(f"{spec.config_path}.model", wrong, allowed, "Choose one of them")


def settle_head(spec: Spec, model: nn.Module, config: Any) -> tuple[str, ...]:
    """Keep a pretrained classifier of the data's classes; return the changes as text.

    Another becomes zeros, as a student's of timm does. `config`: the folder's.
    """
    names = [nfc(str(config.id2label[label])) for label in sorted(config.id2label)]
    numbered = [f"LABEL_{label}" for label in range(len(names))]
    has_head = any(towers.CLASSIFIER in name for name in config.architectures or [])
    classes = [*map(nfc, spec.classes or ())]
    if has_head and len(names) == len(classes) and names in (classes, numbered):
        return ()
    with torch.no_grad():
        for layer in towers.last_layers(model):
            for parameter in layer.parameters():
                parameter.zero_()
    reason = f"for {len(names)} other classes" if has_head else "missing"
    return (
        f"'{spec.model}': its classifier is {reason}: one for the {len(classes)} of the"
        " data begins with zeros",
    )
