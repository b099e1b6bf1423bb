"""A model as a folder that timm loads.

kd reads and writes its config.json, and checks its weights.
"""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from kd.core.errors import ModelError, error_summary
from kd.files.json_file import read_json
from kd.models.classifier import Classifier

PROBLEM_TYPES = {
    "single_label_classification": "one label",
    "multi_label_classification": "several labels",
}
"""transformers' `problem_type` and its meaning."""


# evaluation's, not that of the pretrained weights
CONFIG = {"crop_mode": "center", "interpolation": "bicubic"}


def folder_config(folder: Path, config_path: str = "model") -> dict[str, Any]:
    """Return the config.json of a folder; {} if it has none."""
    config = folder / "config.json"
    if not config.is_file():
        return {}

    def build(content: Any) -> dict[str, Any]:
        # AttributeError: not JSON objects
        content.get("pretrained_cfg", {}).get("label_names")
        return content

    return read_json(config, config_path, "Write the folder anew", build, ModelError)


def folder_classes(folder: Path, config_path: str = "model") -> list[str] | None:
    """Return the class names that an exported folder records, or None."""
    content = folder_config(folder, config_path)
    pretrained = content.get("pretrained_cfg", {})
    names = content.get("label_names") or pretrained.get("label_names")
    return list(names) if names else None


def data_config(network: nn.Module, recorded: Any = None) -> dict[str, Any]:
    """Return the normalization and input size of a timm network.

    `recorded`: those that its trainer recorded.
    """
    from timm.data import resolve_model_data_config

    config = resolve_model_data_config(network, args=recorded)
    size = getattr(getattr(network, "patch_embed", None), "img_size", None)
    if size is not None:  # the built model's, not the pretrained weights'
        config["input_size"] = (3, *size)
    return config


def is_timm(network: nn.Module) -> bool:
    """Return whether timm built a network and can rebuild it by name."""
    return hasattr(network, "pretrained_cfg")


def export_files(
    student: Classifier, classes: Sequence[str], crop: float, problem_type: str = ""
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the tensors of an export.

    `timm.create_model('local-dir:...')` loads that of a timm model.

    `crop` is the share of the shorter side that evaluation's centre crop keeps;
    `problem_type` "": there are no logits.
    """
    network: Any = student.network
    if is_timm(network):
        content = _timm_config(student, classes, crop)
    else:
        content = _foreign_config(student, classes, crop)
        network = getattr(network, "inner", network)
    if problem_type:
        content["problem_type"] = problem_type
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in network.state_dict().items()
    }
    return content, tensors


def _timm_config(
    student: Classifier, classes: Sequence[str], crop: float
) -> dict[str, Any]:
    from timm.models._hub import save_config_for_hf

    network = student.network
    size = student.input_size  # training size of a network for any size
    config = data_config(network)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        model = {"num_classes": len(classes), "label_names": list(classes)}
        data = {
            "input_size": (3, size, size),
            "mean": config["mean"],
            "std": config["std"],
            "crop_pct": crop,
            **CONFIG,
        }
        save_config_for_hf(network, str(path), model_config=model, data_config=data)
        content = json.loads(path.read_text())
    # keys about the architecture's pretrained weights, not these
    stale = "tag license hf_hub_id url paper_ids paper_name origin_url"
    for key in stale.split():
        content["pretrained_cfg"].pop(key, None)
    return content


def _foreign_config(
    student: Classifier, classes: Sequence[str], crop: float
) -> dict[str, Any]:
    """Return the same for a network that timm does not know, in timm's form."""
    scale: Any = student.scale
    shift: Any = student.shift
    scales = 255 * scale.flatten().double()
    means = -shift.flatten().double() / scales
    return {
        "architecture": student.architecture,
        "num_classes": len(classes),
        "label_names": list(classes),
        "pretrained_cfg": {
            "input_size": [3, student.input_size, student.input_size],
            "crop_pct": crop,
            "mean": [round(mean, 6) for mean in means.tolist()],
            "std": [round(std, 6) for std in (1 / scales).tolist()],
        },
    }


HUB_SECONDS = 2.0  # seconds in which a hub must respond
# endings of the requested files
WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".npz")
ARCHITECTURE = (".json",)


def require_fetched(
    config_path: str, source: str, endings: tuple[str, ...] = WEIGHTS
) -> None:
    """Require that `timm.create_model` could fetch the weights.

    Nothing is downloaded.
    """
    # Not checked: weights at other addresses, about one model in a hundred.
    from huggingface_hub import constants
    from timm import get_pretrained_cfg  # type: ignore[attr-defined]

    repository = source.partition(":")[2]
    if not repository:
        config = get_pretrained_cfg(source)
        if config is None or not config.has_weights:
            wrong = f"timm has no pretrained weights of '{source}'"
            remedy = "Take another model, or start from scratch"
            raise ModelError(config_path, wrong, "", remedy)
        repository = "" if config.file else config.hf_hub_id or ""
    name = repository.partition("@")[0].replace("/", "--")
    cache = Path(constants.HF_HUB_CACHE, f"models--{name}")
    if not repository or any(
        file.suffix in endings for file in cache.glob("snapshots/*/*")
    ):
        return
    if reason := _hub_problem(repository):
        wrong = (
            f"the weights of '{source}' are not here, and '{repository}' cannot be"
            f" fetched ({reason})"
        )
        allowed = f"In {cache}, or from a hub that responds within {HUB_SECONDS:g} s"
        raise ModelError(
            config_path,
            wrong,
            allowed,
            "Start once where the network is, or copy that cache",
        )


def _hub_problem(repository: str) -> str:
    """Return why the hub does not list a repository in time; "" if it does."""
    from huggingface_hub import HfApi, constants

    name, _, revision = repository.partition("@")
    problem = f"no response within {HUB_SECONDS:g} s"

    def request() -> None:
        nonlocal problem
        try:
            HfApi(endpoint=constants.ENDPOINT).model_info(
                name, revision=revision or None, timeout=HUB_SECONDS
            )
            problem = ""
        except Exception as error:
            problem = error_summary(error)

    thread = Thread(target=request, daemon=True)  # name resolution has no timeout
    thread.start()
    thread.join(HUB_SECONDS)
    return problem


def cached_models() -> dict[str, Path]:
    """Return the models in this machine's hub cache, by name, and their weights.

    The names are those of a configuration.
    """
    from huggingface_hub import constants

    models = {}
    for file in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*/snapshots/*/*")):
        owner, name = file.parts[-4].split("--", 2)[1:]
        if file.suffix in WEIGHTS:
            models[name if owner == "timm" else f"{owner}/{name}"] = file
    return models


def takes_any_size(name: str) -> bool:
    """Return whether a timm network accepts any image size unchanged.

    False for a vision transformer.
    """
    from timm import get_pretrained_cfg  # type: ignore[attr-defined]

    config = get_pretrained_cfg(name)
    return config is not None and not config.fixed_input_size


def default_side(name: str) -> int:
    """Return the image side of a timm network's weights, pixels.

    It is 0 for a network that accepts any size, a folder or a hub id.
    """
    from timm import get_pretrained_cfg  # type: ignore[attr-defined]

    config = get_pretrained_cfg(name)
    if config is None or not config.fixed_input_size:
        return 0
    return config.input_size[-1]


def input_keys(name: str, side: int) -> dict[str, Any]:
    """Return the key `args` that gives a timm network an input of `side` pixels.

    It is empty for a folder or hub id.

    Also for a CNN from 224 px on, the size of most weights. All others take `img_size`
    (570 networks of 35 families).
    """
    from timm import get_pretrained_cfg  # type: ignore[attr-defined]

    if takes_any_size(name):
        if side >= 224:
            return {}
        return {"args": {"pretrained_cfg_overlay": {"input_size": [3, side, side]}}}
    return {"args": {"img_size": side}} if get_pretrained_cfg(name) else {}


LARGEST = 4096  # network arguments that weights do not show, such as the image size


def require_fitting(
    folder: Path, tensors: Mapping[str, Tensor], config_path: str
) -> None:
    """Refuse a folder whose arguments name layers missing in its weights.

    The network is not built before that.
    """
    import timm

    sides = [side for tensor in tensors.values() for side in tensor.shape]
    arguments = json.dumps(folder_config(folder, config_path).get("model_args", {}))
    largest = max(map(int, re.findall(r"\d+", arguments)), default=0)
    if largest > max([LARGEST, len(tensors), *sides]):
        raise ModelError(
            config_path, f"has the argument {largest}; the weights have no such size"
        )
    count = 0
    # some networks compute when constructed
    with suppress(NotImplementedError, RuntimeError), torch.device("meta"):
        network = timm.create_model(f"local-dir:{folder}")
        count = sum(parameter.numel() for parameter in network.parameters())
    if count > sum(tensor.numel() for tensor in tensors.values()):
        raise ModelError(
            config_path,
            f"names a network of {count:,} parameters, which the weights do not have",
        )


def config_keys() -> set[str]:
    """Return the keys that a config.json may have below `pretrained_cfg`."""
    from timm.models import PretrainedCfg

    return {*PretrainedCfg.__dataclass_fields__, "label_names"}
