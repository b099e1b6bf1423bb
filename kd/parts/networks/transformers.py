"""A transformers model by folder or hub id: a classifier, a backbone, or the image
tower of CLIP and SigLIP.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

from kd.core.errors import ModelError
from kd.core.keys import Keys, file_key, keys
from kd.models.spec import Spec
from kd.parts.networks import _towers as towers
from kd.parts.networks._shared import named


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
) -> towers.TowerTeacher:
    """Load the model with its own normalization and input size."""
    hub = towers.library(spec.config_path)
    config = towers.read_config(spec, hub)
    shown, own = towers.preprocessing(spec, hub, config, image_size)
    vision = towers.vision_config(config)
    common: dict[str, Any] = {**shown, "features": features}
    common["architecture"] = {
        "transformers": type(config).__name__,
        "config": _kept(config),
    }
    patch = getattr(vision, "patch_size", 0)
    wrap = partial(
        towers.Tower, order=own.order, patch=patch if isinstance(patch, int) else 0
    )
    names, pick = (), None
    if spec.logits:
        classes = _own_classes(spec, config)
        model = towers.loaded(spec, hub, "AutoModelForImageClassification", config)
        names, pick = named(spec, len(config.id2label), classes, options.classes)
    else:
        auto = {
            "clip": "CLIPVisionModelWithProjection",
            "siglip": "SiglipVisionModel",
        }.get(config.model_type)
        model = towers.loaded(
            spec, hub, auto or "AutoModel", vision if auto else config
        )
    teacher = towers.TowerTeacher(
        wrap(model, pick=pick), num_classes=len(names), classes=names, **common
    )
    teacher.preprocessing = own.preprocessing
    return teacher


def _own_classes(spec: Spec, config: Any) -> list[str]:
    """Return the names of the model's classes; empty if they are only numbered."""
    if not any(towers.CLASSIFIER in name for name in config.architectures or []):
        wrong = (
            f"'{spec.model}' is a"
            f" {', '.join(config.architectures or [config.model_type])}, which has no"
            " classes"
        )
        remedy = (
            "Take losses on features, such as cosine, or for CLIP and SigLIP"
            " teacher.kind=zero_shot"
        )
        raise ModelError(
            f"{spec.config_path}.model",
            wrong,
            f"A model ...{towers.CLASSIFIER} for losses on logits",
            remedy,
        )
    spec.require_meaning(getattr(config, "problem_type", None) or "")
    own = [config.id2label[label] for label in sorted(config.id2label)]
    return (
        [] if all(name == f"LABEL_{label}" for label, name in enumerate(own)) else own
    )


def _kept(config: Any) -> dict[str, Any]:
    """Return the part of a configuration that outputs may depend on, without its path
    and author.
    """
    names = (
        "_name_or_path",
        "transformers_version",
        "architectures",
        "id2label",
        "label2id",
    )
    left_out = (*names, "dtype", "torch_dtype")
    return {
        key: value
        for key, value in config.to_diff_dict().items()
        if key not in left_out
    }
