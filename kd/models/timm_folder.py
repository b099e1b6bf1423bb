"""A model as a folder that timm loads: what its config.json says, and how it is written."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kd.errors import ModelError
from kd.models.classifier import Classifier

PROBLEM_TYPES = {"single_label_classification": "one label", "multi_label_classification": "several labels"}
"""What logits answer, in the words of transformers, and what an image has."""


def folder_config(folder: Path, where: str = "model") -> dict[str, Any]:
    """Return the config.json of a folder; empty where it has none."""
    config = folder / "config.json"
    if not config.is_file():
        return {}
    try:
        content = json.loads(config.read_text())
        content.get("pretrained_cfg", {}).get("label_names")
    except (ValueError, AttributeError, OSError) as error:
        raise ModelError(where, f"'{config}' is not whole ({error})", "", "Write the folder anew") from error
    return content


def folder_classes(folder: Path, where: str = "model") -> list[str] | None:
    """Return the class names that an exported folder records, or None."""
    content = folder_config(folder, where)
    names = content.get("label_names") or content.get("pretrained_cfg", {}).get("label_names")
    return list(names) if names else None


def data_config(network: nn.Module) -> dict[str, Any]:
    """Return normalization and input size of a timm network: those that it was built for."""
    from timm.data import resolve_model_data_config

    config = resolve_model_data_config(network)
    embed = getattr(network, "patch_embed", None)
    size = getattr(embed, "img_size", None)
    if size is not None:  # what the model was built for, not what its pretrained weights were
        config["input_size"] = (3, *size)
    return config


def is_timm(network: nn.Module) -> bool:
    """Return whether timm built a network, and builds it again by name."""
    return hasattr(network, "pretrained_cfg")


def export_files(
    student: Classifier, classes: Sequence[str], crop: float, problem_type: str = ""
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the tensors of an export; `timm.create_model('local-dir:...')` loads that of a timm model.

    `crop` is the share of the shorter side that evaluation's centre crop keeps; `problem_type` "": there are no logits.
    """
    network: Any = student.network
    content = _timm_config(network, classes, crop) if is_timm(network) else _own_config(student, classes, crop)
    if problem_type:
        content["problem_type"] = problem_type
    network = network if is_timm(network) else getattr(network, "inner", network)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in network.state_dict().items()}
    return content, tensors


def _timm_config(network: nn.Module, classes: Sequence[str], crop: float) -> dict[str, Any]:
    from timm.models._hub import save_config_for_hf

    config = data_config(network)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        save_config_for_hf(
            network,
            str(path),
            model_config={"num_classes": len(classes), "label_names": list(classes)},
            data_config={**{key: config[key] for key in ("input_size", "mean", "std")}, "crop_pct": crop},
        )
        content = json.loads(path.read_text())
    for stale in ("tag", "license", "hf_hub_id", "url", "paper_ids", "paper_name", "origin_url"):
        content["pretrained_cfg"].pop(stale, None)  # of the weights that the architecture's name stands for, not ours
    return content


def _own_config(student: Classifier, classes: Sequence[str], crop: float) -> dict[str, Any]:
    """Return the same of a network that timm does not know, in timm's form."""
    scale, shift = (getattr(student, name).flatten().double() for name in ("scale", "shift"))
    std, mean = 1 / (255 * scale), -shift / (255 * scale)
    pixels = {"mean": [round(value, 6) for value in mean.tolist()], "std": [round(value, 6) for value in std.tolist()]}
    size = student.input_size
    return {
        "architecture": student.architecture,
        "num_classes": len(classes),
        "label_names": list(classes),
        "pretrained_cfg": {"input_size": [3, size, size], **pixels, "crop_pct": crop},
    }
