"""Find pretrained weights for a first run, and choose its teacher."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kd.core.errors import ModelError, first_sentence
from kd.core.text import nfc
from kd.models.load_classifier import require_weights
from kd.models.recognize import identify
from kd.models.spec import Spec
from kd.models.timm_folder import (
    cached_models,
    default_side,
    folder_config,
    input_keys,
)
from kd.parts import registry

WHERE = "--teacher"
# largest MB of weights chosen by default without a GPU: a ViT-S has 88, a ViT-B 346
LARGEST_MB = 120
# of files that a trainer writes
WEIGHT_ENDINGS = (".pth", ".pt", ".bin", ".ckpt", ".tar", ".safetensors")

log = logging.getLogger("kd")


class ChosenTeacher(NamedTuple):
    """The chosen teacher and the reason."""

    keys: dict[str, Any]  # of the section
    why: str  # the reason for the choice
    # what the student learns from: "logits", "features", or "fit" (logits after a fit
    # to the labels)
    role: str
    side: int = 0  # pixels of the images that its weights are for; 0: any
    network: Any = None  # with these weights, to try it on the data


class PretrainedWeights(NamedTuple):
    """Say which keys name pretrained weights, and what is known of them."""

    keys: dict[str, Any]  # of the section
    why: str  # what their file holds; "": they are named
    # pixels of the images that they are for; 0: any, or the folder has it
    side: int = 0


def find_teacher(name: str, classes: Sequence[str], gpu: bool) -> ChosenTeacher | None:
    """Return the named teacher, else the largest local one, if any.

    Without `classes` no teacher can be fitted.
    """
    local_files = cached_models()
    why = f"named by {WHERE}"
    if not name:
        mb = {model: file.stat().st_size / 1e6 for model, file in local_files.items()}
        small = [model for model in mb if gpu or mb[model] <= LARGEST_MB]
        if not small:
            return None
        name = max(small, key=mb.__getitem__)
        why = f"the largest of {', '.join(sorted(local_files))} in the hub's cache here"
    path = Path(name)
    if "/" in name and name in local_files:
        path = local_files[name].parent
    if path.name == "model.safetensors" and path.with_name("config.json").is_file():
        # the folder also has the input size and the normalization
        path = path.parent
        name = str(path)
    if not path.is_dir():
        weights = pretrained_keys(WHERE, name)
        if weights.why:
            return _local_teacher(weights, classes)
        role = "fit" if classes else "logits"
        return ChosenTeacher(weights.keys, why, role, weights.side)
    config = folder_config(path, WHERE)
    if not config:
        allowed = "A folder that kd-export, timm or transformers wrote"
        raise ModelError(
            WHERE, f"no config.json in '{path}'", allowed, "Name the file of weights"
        )
    if "model_type" not in config:
        return _local_teacher(PretrainedWeights({"model": name}, why), classes)
    labels = sorted(map(nfc, config.get("id2label", {}).values()))  # transformers'
    role = "features"
    if labels and (not classes or labels == sorted(map(nfc, classes))):
        role = "logits"
    return ChosenTeacher({"kind": "transformers", "model": name}, why, role)


def _local_teacher(weights: PretrainedWeights, classes: Sequence[str]) -> ChosenTeacher:
    """Return a teacher of local weights; it needs a fit unless it has the classes."""
    keys = weights.keys
    sized = input_keys(keys["model"], weights.side) if weights.side else {}
    spec = Spec(
        WHERE,
        args=sized.get("args", {}),
        classes=classes or None,
        pretrained="checkpoint" not in keys,
        exact_head=True,
        **keys,
    )
    options = registry.default_options("networks", "timm")
    try:
        network = registry.build(
            "networks", "timm", options, WHERE, spec=spec, image_size=0, features=()
        )
    except ModelError as error:
        why = f"{weights.why}; {first_sentence(error.wrong)}"
        return ChosenTeacher(keys, why, "fit", weights.side)
    # A vision transformer would be built for the data's size.
    keys = keys | input_keys(keys["model"], network.input_size)
    why = f"{weights.why}; it has an output for each class"
    return ChosenTeacher(keys, why, "logits", weights.side, network)


def pretrained_keys(config_path: str, text: str) -> PretrainedWeights:
    """Return keys for the weights NAME, FILE or NAME=FILE, and the facts in a file."""
    model, _, file = text.rpartition("=")
    path = Path(file)
    if not model and path.suffix not in WEIGHT_ENDINGS and not path.is_file():
        require_weights(Spec(config_path, text, {}, (), pretrained=True))
        return PretrainedWeights({"model": text}, "", default_side(text))
    model, by_order, why, side = identify(config_path, path, model)
    log.info("%s: %s", file, why)
    keys = {"model": model, "checkpoint": file}
    if by_order:
        keys["weights"] = "by_order"
    return PretrainedWeights(keys, why, side)


def resampled_note(side: int, used: int) -> str:
    """Return what other pixels than those of its weights cost a transformer.

    Args:
        side: pixels of the images that its weights are for; 0: any.
        used: pixels of the images that the configuration gives it.

    Returns:
        A comment; "" if nothing is resampled.
    """
    if side in (0, used):
        return ""
    return (
        f"its positions are resampled from {side} to {used} px; args: {{img_size:"
        f" {side}}} keeps them, with {(side / used) ** 2:.1f} times the pixels"
    )
