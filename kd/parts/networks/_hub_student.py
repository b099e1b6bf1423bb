"""Adapt a transformers model to the data that a student learns: classes and size."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kd.core.errors import ModelError
from kd.core.text import nfc
from kd.models.checkpoints import read_weights
from kd.models.fitting import match_state_dict
from kd.models.load_classifier import without_meta_warnings
from kd.models.spec import Spec
from kd.models.timm_folder import folder_config
from kd.parts.networks import _towers as towers
from kd.parts.networks._processor import Preparation
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


def require_pixels(spec: Spec, preparation: Preparation) -> None:
    """Refuse a checkpoint of an export that takes pixels in another way.

    Raises:
        ModelError: mean, deviation or order of channels differ.
    """
    if not spec.checkpoint:
        return
    place = Path(spec.checkpoint).expanduser()
    folder = place if place.is_dir() else place.parent
    content = folder_config(folder, f"{spec.config_path}.checkpoint")
    architecture = content.get("architecture")
    if not isinstance(architecture, dict) or towers.EXPORTED not in architecture:
        return
    exported = towers.exported_preparation(content)
    for name in ("mean", "std", "order"):
        theirs, ours = getattr(exported, name), getattr(preparation, name)
        if not np.allclose(theirs, ours, atol=1e-4):
            wrong = f"its export has pixels of {name} {theirs}, the student {ours}"
            remedy = f"Set {spec.config_path}.model={folder}, and leave checkpoint out"
            path = f"{spec.config_path}.checkpoint"
            raise ModelError(path, wrong, "The same for both", remedy)


def load_weights(spec: Spec, model: nn.Module, config: Any) -> tuple[str, ...]:
    """Load the checkpoint, if one is named, and settle the classifier.

    Args:
        spec: of a pretrained student.
        model: with the weights of its folder or hub id, or random ones.
        config: the folder's.

    Returns:
        The changes, as text.

    Raises:
        ModelError: the checkpoint has other tensors than the model.
    """
    names = _class_names(config)
    steps: tuple[str, ...] = ()
    if spec.checkpoint:
        names, steps = _load_checkpoint(spec, model)
    if spec.logits:
        steps += _settle_head(spec, model, names)
    return steps


def _class_names(config: Any) -> list[str]:
    """Return the classes of a folder's classifier; [] if it has none."""
    if not any(towers.CLASSIFIER in name for name in config.architectures or []):
        return []
    return [nfc(str(config.id2label[label])) for label in sorted(config.id2label)]


def _numbered(count: int) -> list[str]:
    """Return transformers' names of classes without a name."""
    return [f"LABEL_{label}" for label in range(count)]


def _load_checkpoint(spec: Spec, model: nn.Module) -> tuple[list[str], tuple[str, ...]]:
    """Load a file of weights but a classifier of other classes.

    Return the file's classes, and what was done, as text.
    """
    weights = read_weights(f"{spec.config_path}.checkpoint", spec.checkpoint)
    classifiers = towers.classifiers(model).items()
    heads = [f"{name}.{key}" for name, head in classifiers for key in head.state_dict()]
    fitting = match_state_dict(
        weights, model, spec.model, spec.weights, heads, bare=not spec.logits
    )
    state = model.state_dict()
    fits = {
        name: tensor
        for name, tensor in fitting.tensors.items()
        if tensor.shape == state[name].shape
    }
    with without_meta_warnings():
        model.load_state_dict({**state, **fits})
    count = next((len(fitting.tensors[k]) for k in heads if k in fitting.tensors), 0)
    names = weights.classes or _numbered(count)
    return [*map(nfc, names)] if count else [], fitting.steps


def _settle_head(spec: Spec, model: nn.Module, names: list[str]) -> tuple[str, ...]:
    """Keep a classifier of the data's classes; another becomes zeros, as in timm."""
    classes = [*map(nfc, spec.classes or ())]
    if len(names) == len(classes) and names in (classes, _numbered(len(names))):
        return ()
    with torch.no_grad():
        for layer in towers.last_layers(model):
            for parameter in layer.parameters():
                parameter.zero_()
    reason = f"for {len(names)} other classes" if names else "missing"
    return (
        f"'{spec.checkpoint or spec.model}': its classifier is {reason}: one for the"
        f" {len(classes)} of the data begins with zeros",
    )
