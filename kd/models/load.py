"""Any timm model by name, local folder, safetensors file or hub id; a class count that does not fit is an error."""

import json
import math
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from kd.core.errors import ModelError, did_you_mean, in_short
from kd.core.text import nfc
from kd.models import packages, timm_folder
from kd.models.classifier import Classifier, Preprocessing
from kd.models.spec import Spec

FITTED = (
    "Name all of its outputs in a file, one a line (teacher.classes=FILE); or fit it to this data: "
    "teacher.pretrained=true with teacher.fit.epochs"
)


def load(spec: Spec, image_size: int, features: Collection[str] = ()) -> Classifier:
    """Build a model with its weights; `image_size`, what the data delivers, is its input size where that is free."""
    if not spec.logits:
        spec = replace(spec, exact_head=False)
    source = _source(spec)
    weights = read_tensors(spec)
    pretrained = spec.pretrained and weights is None
    own = _own_classes(spec, source, weights) if spec.classes is None else None
    _require_source(spec, source, pretrained)
    count = len(spec.classes or own or ())
    network, sized = _create(spec, source, pretrained, image_size, count)
    classes = spec.classes if spec.classes is not None else own or _numbered(network)
    if spec.exact_head and (spec.checkpoint or source.startswith("local-dir:")):
        folder = Path(spec.checkpoint or source.removeprefix("local-dir:"))
        content = timm_folder.folder_config(folder if folder.is_dir() else folder.parent)
        spec.require_meaning(content.get("problem_type") or "")
    if pretrained and spec.classes:
        _settle_pretrained_head(spec, network)
    if weights is not None:
        _load_weights(spec, network, *weights)
    config = timm_folder.data_config(network)
    described = {"pretrained_cfg", "pretrained_cfg_overlay", "img_size"} & spec.args.keys()
    free = sized if getattr(network, "pretrained_cfg", {}).get("fixed_input_size") else spec.free_size
    made = Classifier(
        _laid_out(network),
        num_classes=len(classes),
        input_size=image_size if free and not described else config["input_size"][-1],
        mean=config["mean"],
        std=config["std"],
        features=features,
        architecture=_architecture(spec, source),
        classes=classes,
    )
    if spec.by_order and weights is not None:
        made.notes = (f"the tensors of '{spec.checkpoint}' were taken by their order, whatever their names",)
    made.preprocessing = _preprocessing(config) if spec.exact_head and pretrained else None
    return made


def _laid_out(network: nn.Module) -> nn.Module:
    """Let a convolutional network keep channels last in memory."""
    # On one AMD EPYC core in bfloat16 a training step of a ResNet-18 at 64 px then takes 0.89 of the time, that of a
    # ResNet-10 of 24 channels 0.70 (benchmarks/layout.py). Torch cannot lay out weights of 5 dimensions
    # (lambda_resnet).
    convolved = sum(m.weight.numel() for m in network.modules() if isinstance(m, nn.Conv2d))
    if 2 * convolved < sum(p.numel() for p in network.parameters()) or any(p.dim() == 5 for p in network.parameters()):
        return network
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _preprocessing(config: dict[str, Any]) -> Preprocessing:
    from timm.data import create_transform

    keys = ("input_size", "crop_pct", "crop_mode", "interpolation")
    shown = ", ".join(f"{key} {config[key]}" for key in keys if key in config)
    return Preprocessing("timm", create_transform(**config, is_training=False), shown)  # type: ignore[arg-type]


def identify(where: str, file: Path, model: str = "") -> tuple[str, bool]:
    """Return the network of timm that a file of weights belongs to, and whether its tensors have other names.

    Tried are `model`, or the networks whose names are in the file's name. Weights under other names are more often
    those of a network `tf_...` than of its twin, since they were converted from TensorFlow.
    """
    import timm

    plain = partial(re.sub, "[^a-z0-9]", "")
    weights, stem = read_tensors(Spec(where, "", {}, (), checkpoint=str(file))), plain(file.stem.lower())
    near = [model] if model else [name for name in timm.list_models() if plain(name.removeprefix("tf_")) in stem]
    for by_order in (False, True):
        for name in sorted(near, key=lambda name: ((plain(name) in stem) == by_order, -len(name))):
            spec = Spec(where, name, {}, (), checkpoint=str(file), by_order=by_order)
            with suppress(ModelError), torch.device("meta"):
                _load_weights(spec, _create(spec, _source(spec), False, 224, 0)[0], *weights)
                return name, by_order
    wrong = f"'{file}' holds the weights of no network of timm whose name is in the file's name"
    raise ModelError(where, wrong, "NAME=FILE, where NAME has a fitting network", f"Tried: {', '.join(near) or 'none'}")


def _source(spec: Spec) -> str:
    """Return the name as timm wants it: a registered name, `local-dir:FOLDER` or `hf-hub:ID`."""
    import timm

    name = spec.model
    if name.startswith(("hf-hub:", "hf_hub:")):
        return name
    folder = Path(name.removeprefix("local-dir:"))
    if name.startswith("local-dir:") or (folder.is_dir() and (folder / "config.json").is_file()):
        if not (folder / "config.json").is_file():
            remedy = "Point at a folder written by `kd-export` or timm.models.save_for_hf"
            raise ModelError(f"{spec.where}.model", f"no config.json in '{folder}'", "", remedy)
        return f"local-dir:{folder}"
    try:
        known = timm.is_model(name.partition(".")[0])
        timm.get_pretrained_cfg(name)
    except RuntimeError:  # of this model, but not with this tag
        known = False
    if not known:
        near = did_you_mean(name, [*timm.list_models(), *timm.list_pretrained()])
        allowed = "A timm model name, a folder with config.json, or hf-hub:owner/name"
        remedy = near or "List names with `python -c 'import timm; print(timm.list_models())'`"
        raise ModelError(f"{spec.where}.model", f"no model '{name}'", allowed, remedy)
    return name


def require_weights(spec: Spec) -> None:
    """Require the weights that `load` would read: a file that is there, or one in reach; nothing is downloaded."""
    if spec.checkpoint:
        _weights_file(spec)
    else:
        _require_source(spec, _source(spec), spec.pretrained)


def _require_source(spec: Spec, source: str, pretrained: bool) -> None:
    if source.startswith("local-dir:"):
        if pretrained or spec.args.get("pretrained"):
            folder = Path(source.removeprefix("local-dir:"))
            if not (folder / "model.safetensors").is_file():  # other weights are pickles: loading may run their code
                allowed = "Weights as safetensors; other formats may run code when they are loaded"
                remedy = "Write it anew with `kd-export` or timm.models.save_for_hf(..., safe_serialization=True)"
                raise ModelError(f"{spec.where}.model", f"no model.safetensors in '{folder}'", allowed, remedy)
    elif pretrained or ":" in source:
        wanted = timm_folder.WEIGHTS if pretrained else timm_folder.ARCHITECTURE
        timm_folder.require_fetched(f"{spec.where}.model", source, wanted)


def _architecture(spec: Spec, source: str) -> dict[str, Any]:
    """Return what the network is built from, wherever its folder lies: the model's name and its arguments."""
    if not source.startswith("local-dir:"):
        return {"model": source, "args": spec.args}
    content = timm_folder.folder_config(Path(source.removeprefix("local-dir:")), f"{spec.where}.model")
    return {"model": content.get("architecture"), "args": {**content.get("model_args", {}), **spec.args}}


def _own_classes(spec: Spec, source: str, weights: Any) -> list[str] | None:
    """Return the names of a model's own classes, from its folder or its checkpoint; None: timm knows their number."""
    import timm

    tensors, names = weights or ({}, None)
    folder = Path(source.removeprefix("local-dir:"))
    names = names or (timm_folder.folder_classes(folder) if source.startswith("local-dir:") else None)
    if names:
        return names
    config = None if source.startswith("local-dir:") or ":" in source else timm.get_pretrained_cfg(source)
    heads = [f"{getattr(config, 'classifier', None) or 'head'}.weight", "head.weight", "fc.weight", "classifier.weight"]
    count = next((tensors[name].shape[0] for name in heads if name in tensors), 0)
    if spec.by_order and tensors:  # the last one is the classifier's bias
        count = next(reversed(tensors.values())).shape[0]
    if not count and spec.pretrained and not tensors:
        return None  # timm builds the head that belongs to the weights
    if not count:
        wrong = f"'{spec.model}' names no classes, and neither does the data (data.labels=none)"
        allowed = "A checkpoint in a folder with label_names, as kd-export writes it"
        remedy = "Choose such a teacher, or take losses on features"
        raise ModelError(f"{spec.where}.checkpoint", wrong, allowed, remedy)
    return [f"class_{label}" for label in range(count)]


def _numbered(network: nn.Module) -> list[str]:
    names = (getattr(network, "pretrained_cfg", None) or {}).get("label_names")
    return list(names or [f"class_{label}" for label in range(int(getattr(network, "num_classes", 0)))])


def _create(spec: Spec, source: str, pretrained: bool, image_size: int, count: int) -> tuple[nn.Module, bool]:
    """Return the network, and whether it was built for `image_size`."""
    import timm

    args = dict(spec.args)
    if count or spec.classes is not None:
        args["num_classes"] = count
    if source.startswith("local-dir:") and not pretrained:
        args.setdefault("pretrained", False)
    last = Exception()
    # A model whose input size is free (a ViT) is built for the data's; others refuse the argument and resize.
    stored = source.startswith(("local-dir:", "hf-hub:", "hf_hub:"))
    tries = [{}] if "img_size" in args or stored else [{"img_size": image_size}, {}]
    if spec.any_size and "dynamic_img_size" not in args:  # of timm's ViTs; others refuse it
        tries = [{**one, "dynamic_img_size": True} for one in tries] + tries
    for sized in tries:
        try:
            with without_meta_warnings():
                made = timm.create_model(source, **{"pretrained": pretrained, **args, **sized})
            return made, "img_size" in sized
        except Exception as error:  # timm raises many types, all caused by name, arguments or config.json
            last = error
            if not isinstance(error, TypeError):
                break
    reason = " ".join(str(last).split())[:300]
    allowed = f"Arguments given: {json.dumps(spec.args)}" if spec.args else ""
    wrong = f"'{spec.model}' cannot be built ({type(last).__name__}: {reason})"
    remedy = f"Correct {spec.where}.model or {spec.where}.args"
    raise ModelError(f"{spec.where}.model", wrong, allowed, remedy) from last


@contextmanager
def without_meta_warnings() -> Iterator[None]:
    """On the meta device weights are only compared; torch would warn of each tensor that it does not copy."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter", UserWarning)
        yield


def read_tensors(spec: Spec) -> Any:
    """Read the checkpoint: tensors by name and the class names written beside them, where there are any."""
    if not spec.checkpoint:
        return None
    file, where = _weights_file(spec), f"{spec.where}.checkpoint"
    if file.suffix != ".safetensors":
        return timm_folder.unpickled(file, where), timm_folder.folder_classes(file.parent, where)
    if spec.by_order:
        wrong = f"'{file}' is safetensors, which keep no order, but {spec.where}.weights is by_order"
        raise ModelError(where, wrong, "A .pth file", f"Name that, or leave {spec.where}.weights out")
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            where, f"'{file}' is not whole safetensors ({in_short(error)})", "", "Write the file anew"
        ) from error
    return tensors, timm_folder.folder_classes(file.parent, where)


def _weights_file(spec: Spec) -> Path:
    path = Path(packages.fetched(f"{spec.where}.checkpoint", spec.checkpoint))
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        remedy = "Check the path" + (", or fit a teacher with `kd-teach`" if spec.where.startswith("teacher") else "")
        allowed = "A .safetensors or .pth file, or a folder with model.safetensors"
        raise ModelError(f"{spec.where}.checkpoint", f"no file '{file}'", allowed, remedy)
    return file


def _settle_pretrained_head(spec: Spec, network: nn.Module) -> None:
    """Refuse a teacher's weights of another class list; timm would put a random head in their place and go on."""
    # A student of other classes gets zeros: timm's random head starts an EfficientNet at a cross-entropy of 9.4.
    classes, config = spec.classes or (), getattr(network, "pretrained_cfg", None) or {}
    count, names = config.get("num_classes"), config.get("label_names")
    folder = Path(spec.model.removeprefix("local-dir:"))
    names = names or (timm_folder.folder_classes(folder) if folder.is_dir() else None)
    if spec.exact_head:
        _check_count(f"{spec.where}.model", count, classes)
        if names:
            check_classes(f"{spec.where}.model", names, classes)
    elif (names and list(names) != list(classes)) or (count is not None and count != len(classes)):
        for name, tensor in network.state_dict().items():
            if name in _head_names(network):
                tensor.zero_()


def check_classes(where: str, names: Sequence[str], classes: Sequence[str]) -> None:
    """Require the model's class names to be the data's, in the same order."""
    _check_count(where, len(names), classes)
    for i, (name, expected) in enumerate(zip(names, classes, strict=True)):
        if nfc(name) != nfc(expected):
            same_set = " (the same classes in another order)" if set(names) == set(classes) else ""
            wrong = f"class {i} is '{name}', the data's is '{expected}'{same_set}"
            allowed = "Classes and their order must be the data's"
            raise ModelError(where, wrong, allowed, "Correct the file" if where.endswith(".classes") else FITTED)


def _check_count(where: str, count: int | None, classes: Sequence[str]) -> None:
    if count is not None and count != len(classes):
        wrong = f"has {count} classes, the data has {len(classes)}"
        own = f"Set the number in {where.partition('.')[0]}.args, or take a model of these classes"
        remedy = own if where.startswith("student") else FITTED
        raise ModelError(where, wrong, "Both must be equal: a new head would be random", remedy)


def _load_weights(spec: Spec, network: nn.Module, tensors: dict[str, Tensor], names: list[str] | None) -> None:
    where, classes = f"{spec.where}.checkpoint", spec.classes or names or ()
    own = network.state_dict()
    tensors = timm_folder.unwrapped(tensors, own)
    if spec.by_order:
        free = ["pos_embed", *_head_names(network)]  # these are looked at below
        tensors = timm_folder.in_order(where, spec.model, own, tensors, free, 0 if spec.logits else 2)
    if not spec.logits:  # without those of a classifier, as timm's configuration of the network names it
        heads = (getattr(network, "pretrained_cfg", None) or {}).get("classifier") or "head"
        prefixes = tuple(f"{head}." for head in ([heads] if isinstance(heads, str) else heads))
        tensors = {name: t for name, t in tensors.items() if name in own or not name.startswith(prefixes)}
    tensors = _at_this_size(tensors, own, network)
    head = next((name for name in _head_names(network) if name in tensors), None)
    if head is not None and spec.exact_head and spec.classes:
        _check_count(where, tensors[head].shape[0], classes)
    if names is not None and spec.exact_head:
        check_classes(where, names, classes)
    if not spec.exact_head and spec.logits:  # weights of other classes: the student gets a head of zeros
        tensors = {name: t for name, t in tensors.items() if name not in own or t.shape == own[name].shape}
        fresh = {name: torch.zeros_like(own[name]) for name in _head_names(network) if name in own}
        same = names is None or list(names) == list(classes)
        tensors = {**fresh, **tensors} if same else {**tensors, **fresh}
    timm_folder.require_same_tensors(where, spec.model, own, tensors)
    with without_meta_warnings():
        network.load_state_dict(tensors)


def _at_this_size(tensors: dict[str, Tensor], own: dict[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Resample the position embedding of a vision transformer that was trained on another image size, as timm does."""
    given, needed = tensors.get("pos_embed"), own.get("pos_embed")
    grid = getattr(getattr(network, "patch_embed", None), "grid_size", None)
    if given is None or needed is None or grid is None or given.ndim != 3 or given.shape[1] == needed.shape[1]:
        return tensors
    from timm.layers import resample_abs_pos_embed

    kept = 0 if getattr(network, "no_embed_class", False) else int(getattr(network, "num_prefix_tokens", 1))
    if math.isqrt(given.shape[1] - kept) ** 2 != given.shape[1] - kept:
        return tensors
    return {**tensors, "pos_embed": resample_abs_pos_embed(given, list(grid), num_prefix_tokens=kept)}


def _head_names(network: nn.Module) -> list[str]:
    head = getattr(network, "get_classifier", lambda: None)()
    prefix = next((name for name, module in network.named_modules() if module is head), "head")
    return [f"{prefix}.weight", f"{prefix}.bias"]
