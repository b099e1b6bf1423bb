"""A model of transformers: a classifier, a backbone, or the image tower of CLIP and SigLIP, by folder or hub id."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kd.errors import ModelError
from kd.models.load import Spec
from kd.teachers._shared import named
from kd.teachers._towers import Tower, TowerTeacher, library, loaded, preprocessing, read_config, vision_config
from kd.types import file_key


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What may differ from the folder."""

    classes: str = file_key("")
    """Text file of the class names, one a line, in the order of the logits, where the data names its classes otherwise
    than the model's `id2label`."""


def build(options: Options, spec: Spec, image_size: int, features: Collection[str]) -> TowerTeacher:
    """Load the model with its own normalization and input size.

    Raises:
        MissingExtra: transformers is not installed.
        ModelError: no such model, no preprocessing, missing weights, no classes or other classes than the data's.
    """
    hub = library(spec.where)
    config = read_config(spec, hub)
    shown = preprocessing(spec, hub, config)
    vision = vision_config(config)
    architecture: Any = {"transformers": type(config).__name__, "config": _kept(config)}
    common: dict[str, Any] = {**shown, "architecture": architecture, "features": features}
    patch = getattr(vision, "patch_size", 0)
    patch = patch if isinstance(patch, int) else 0
    if not spec.logits:
        auto = {"clip": "CLIPVisionModelWithProjection", "siglip": "SiglipVisionModel"}.get(config.model_type)
        config = vision if auto else config
        projected = config.model_type.startswith("clip")
        model = loaded(spec, hub, auto or "AutoModel", config)
        return TowerTeacher(Tower(model, patch, projected), num_classes=0, **common)
    if not any(name.endswith("ForImageClassification") for name in config.architectures or []):
        raise ModelError(
            f"{spec.where}.model",
            f"'{spec.model}' is a {', '.join(config.architectures or [config.model_type])}, which has no classes",
            "A model ...ForImageClassification for losses on logits",
            "Take losses on features, such as cosine, or for CLIP and SigLIP teacher.kind=zero_shot",
        )
    spec.require_meaning(getattr(config, "problem_type", None) or "")
    model = loaded(spec, hub, "AutoModelForImageClassification", config)
    own = [config.id2label[label] for label in sorted(config.id2label)]
    own = [] if all(name == f"LABEL_{label}" for label, name in enumerate(own)) else own
    names = named(spec, len(config.id2label), own, options.classes)
    return TowerTeacher(Tower(model, patch), num_classes=len(names), classes=names, **common)


def _kept(config: Any) -> dict[str, Any]:
    """Return what of a configuration the answers may depend on: neither where it lies nor who wrote it."""
    left_out = (
        "_name_or_path",
        "transformers_version",
        "architectures",
        "id2label",
        "label2id",
        "dtype",
        "torch_dtype",
    )
    return {key: value for key, value in config.to_diff_dict().items() if key not in left_out}
