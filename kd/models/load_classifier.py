"""Load a timm model by name, local folder, safetensors file or hub id; a wrong class count is an error."""

import json
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kd.core.errors import ModelError, did_you_mean
from kd.core.text import nfc
from kd.models import checkpoints, timm_folder
from kd.models.checkpoints import Weights
from kd.models.classifier import Classifier, Preprocessing
from kd.models.fitting import Taken, config_of, take
from kd.models.spec import Spec

FIT = "it to this data: teacher.pretrained=true with teacher.fit.epochs; or learn its features: losses=[{kind: cosine}]"
FITTED = f"Name all of its outputs in a file, one a line (teacher.classes=FILE); or fit {FIT}"
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in grey (ITU-R BT.601, as in Pillow)


def load(spec: Spec, image_size: int, features: Collection[str] = ()) -> Classifier:
    """Build a model with its weights. If its input size is free, it is `image_size`, the side of the data's images."""
    if not spec.logits:
        spec = replace(spec, exact_head=False)
    source = _source(spec)
    weights = checkpoints.read(f"{spec.where}.checkpoint", spec.checkpoint) if spec.checkpoint else None
    pretrained = spec.pretrained and weights is None
    own, taken = _own_classes(spec, source, weights, image_size) if spec.classes is None else (None, None)
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
    steps = _load_weights(spec, network, weights, taken) if weights is not None else ()
    config = timm_folder.data_config(network)
    if spec.exact_head and spec.args.get("in_chans") == 1:
        steps = (*steps, _see_grey(spec, network, config))
    described = {"pretrained_cfg", "pretrained_cfg_overlay", "img_size"} & spec.args.keys()
    free = sized if config_of(network).get("fixed_input_size") else spec.free_size
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
    made.notes = (f"'{spec.checkpoint or spec.model}': {'; '.join(steps)}",) if steps else ()
    made.preprocessing = _preprocessing(config) if spec.exact_head and pretrained else None
    return made


def _laid_out(network: nn.Module) -> nn.Module:
    """Convert a convolutional network to channels-last memory format."""
    # On one AMD EPYC core in bfloat16 a training step then takes 0.89 of the time for a ResNet-18 at 64 px, and 0.70
    # for a ResNet-10 with 24 channels (benchmarks/layout.py). Not for 5-dimensional weights (lambda_resnet).
    convolved = sum(m.weight.numel() for m in network.modules() if isinstance(m, nn.Conv2d))
    if 2 * convolved < sum(p.numel() for p in network.parameters()) or any(p.dim() == 5 for p in network.parameters()):
        return network
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _preprocessing(config: dict[str, Any]) -> Preprocessing:
    from timm.data import create_transform

    keys = ("input_size", "crop_pct", "crop_mode", "interpolation")
    shown = ", ".join(f"{key} {config[key]}" for key in keys if key in config)
    return Preprocessing("timm", create_transform(**config, is_training=False), shown)  # type: ignore[arg-type]


def built_bare(where: str, model: str) -> tuple[nn.Module, list[str]]:
    """Return a timm network with default arguments, without weights, and the names of its classifier."""
    spec = Spec(where, model, {}, None)
    network, _ = _create(spec, _source(spec), False, 0, 0)
    return network, _head_names(network)


def _source(spec: Spec) -> str:
    """Return the name in timm's form: a registered name, `local-dir:FOLDER` or `hf-hub:ID`."""
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
    """Require that the weights for `load` exist or can be fetched; nothing is downloaded."""
    if spec.checkpoint:
        checkpoints.located(f"{spec.where}.checkpoint", spec.checkpoint)
    else:
        _require_source(spec, _source(spec), spec.pretrained)


def _require_source(spec: Spec, source: str, pretrained: bool) -> None:
    if source.startswith("local-dir:"):
        if pretrained or spec.args.get("pretrained"):
            folder = Path(source.removeprefix("local-dir:"))
            if not (folder / "model.safetensors").is_file():  # other formats are pickles: loading may run their code
                allowed = "Weights as safetensors; other formats may run code when they are loaded"
                remedy = "Write it anew with `kd-export` or timm.models.save_for_hf(..., safe_serialization=True)"
                raise ModelError(f"{spec.where}.model", f"no model.safetensors in '{folder}'", allowed, remedy)
    elif pretrained or ":" in source:
        wanted = timm_folder.WEIGHTS if pretrained else timm_folder.ARCHITECTURE
        timm_folder.require_fetched(f"{spec.where}.model", source, wanted)


def _architecture(spec: Spec, source: str) -> dict[str, Any]:
    """Return the network's recipe, independent of its folder: the model's name and its arguments."""
    if not source.startswith("local-dir:"):
        return {"model": source, "args": spec.args}
    content = timm_folder.folder_config(Path(source.removeprefix("local-dir:")), f"{spec.where}.model")
    return {"model": content.get("architecture"), "args": {**content.get("model_args", {}), **spec.args}}


def _own_classes(
    spec: Spec, source: str, weights: Weights | None, image_size: int
) -> tuple[list[str] | None, Taken | None]:
    """Return the names of a model's own classes, and the tensors that were read for them (None: timm has the names)."""
    names = weights.classes if weights is not None else None
    names = names or (timm_folder.folder_classes(Path(source.removeprefix("local-dir:"))) if ":" in source else None)
    if names or (spec.pretrained and weights is None):
        return names, None  # without a file timm builds the head of its pretrained weights
    taken, count = None, 0
    if weights is not None:
        with torch.device("meta"):  # the classifier's name comes from the network, its number of rows from the file
            bare = _create(spec, source, False, image_size, 0)[0]
        taken = _take(spec, bare, weights)
        count = next((len(taken.tensors[name]) for name in _head_names(bare) if name in taken.tensors), 0)
    if not count and weights is not None:
        raise _headless(weights.where, weights)
    if not count:
        wrong = f"'{spec.model}' names no classes, and neither does the data (data.labels=none)"
        allowed = "A checkpoint in a folder with label_names, as kd-export writes it"
        remedy = "Choose such a teacher, or take losses on features"
        raise ModelError(f"{spec.where}.checkpoint", wrong, allowed, remedy)
    return [f"class_{label}" for label in range(2 if count == 1 and spec.softmax else count)], taken


def _numbered(network: nn.Module) -> list[str]:
    names = config_of(network).get("label_names")
    return list(names or [f"class_{label}" for label in range(int(getattr(network, "num_classes", 0)))])


def _create(spec: Spec, source: str, pretrained: bool, image_size: int, count: int) -> tuple[nn.Module, bool]:
    """Build the network; also return whether it was built for `image_size`."""
    import timm

    args = dict(spec.args)
    if count or spec.classes is not None:
        args["num_classes"] = count
    if source.startswith("local-dir:") and not pretrained:
        args.setdefault("pretrained", False)
    last = Exception()
    # A model with a free input size (ViT) is built for the data's; others refuse the argument and resize.
    stored = source.startswith(("local-dir:", "hf-hub:", "hf_hub:"))
    tries = [{}] if "img_size" in args or stored or not image_size else [{"img_size": image_size}, {}]
    if spec.any_size and "dynamic_img_size" not in args:  # an argument of timm's ViTs; others refuse it
        tries = [{**one, "dynamic_img_size": True} for one in tries] + tries
    for sized in tries:
        try:
            with without_meta_warnings():
                made = timm.create_model(source, **{"pretrained": pretrained, **args, **sized})
            return made, "img_size" in sized
        except Exception as error:  # timm raises many types; all are caused by name, arguments or config.json
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
    """Suppress a warning: on the meta device weights are only compared, and torch warns of each uncopied tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter", UserWarning)
        yield


def _settle_pretrained_head(spec: Spec, network: nn.Module) -> None:
    """Refuse a teacher's weights with another class list; timm would use a random head instead."""
    # A student with other classes gets a zero head: timm's random head starts an EfficientNet at a cross-entropy of
    # 9.4.
    classes, config = spec.classes or (), config_of(network)
    count, names = config.get("num_classes"), config.get("label_names")
    folder = Path(spec.model.removeprefix("local-dir:"))
    names = names or (timm_folder.folder_classes(folder) if folder.is_dir() else None)
    if spec.exact_head:
        _check_count(f"{spec.where}.model", count, classes)
        if names:
            check_classes(f"{spec.where}.model", names, classes)
    elif (names and [*map(nfc, names)] != [*map(nfc, classes)]) or (count is not None and count != len(classes)):
        for name, tensor in network.state_dict().items():
            if name in _head_names(network):
                tensor.zero_()


class OtherOrder(ModelError):
    """The model has the data's classes in another order."""


def check_classes(where: str, names: Sequence[str], classes: Sequence[str]) -> None:
    """Require the model's class names to equal the data's, in the same order; `OtherOrder` if only that differs."""
    _check_count(where, len(names), classes)
    for i, (name, expected) in enumerate(zip(names, classes, strict=True)):
        if nfc(name) != nfc(expected):
            permuted = set(map(nfc, names)) == set(map(nfc, classes))
            wrong = f"class {i} is '{name}', the data's is '{expected}'"
            wrong += " (the same classes in another order)" if permuted else ""
            remedy = "Correct the names in the file" if where.endswith(".classes") else FITTED
            raise (OtherOrder if permuted else ModelError)(where, wrong, "The data's classes", remedy)


def _check_count(where: str, count: int | None, classes: Sequence[str]) -> None:
    if count is not None and count != len(classes):
        wrong = f"has {count} classes, the data has {len(classes)}"
        own = f"Set the number in {where.partition('.')[0]}.args, or take a model of these classes"
        remedy = own if where.startswith("student") else FITTED
        raise ModelError(where, wrong, "Both must be equal: a new head would be random", remedy)


def _headless(where: str, weights: Weights) -> ModelError:
    return ModelError(
        where, f"'{weights.file}' has no classifier", "Weights with one for losses on logits", f"Fit {FIT}"
    )


def _load_weights(spec: Spec, network: nn.Module, weights: Weights, taken: Taken | None) -> tuple[str, ...]:
    """Load a file's tensors with its classifier (zeros for a student of other classes); report the changes."""
    where, names, classes = weights.where, weights.classes, spec.classes or weights.classes or ()
    taken, own, heads = taken or _take(spec, network, weights), network.state_dict(), _head_names(network)
    tensors, steps = taken.tensors, taken.steps
    head = next((name for name in heads if name in tensors), None)
    if spec.exact_head and head is None and heads[0] in own:
        raise _headless(where, weights)
    if spec.exact_head and head is not None and spec.softmax and len(tensors[head]) == 1 and len(own[head]) == 2:
        tensors |= {name: torch.cat([torch.zeros_like(tensors[name]), tensors[name]]) for name in heads if name in own}
        steps = (*steps, f"its one logit z became [0, z]: '{[*classes, 'class_1', 'class_1'][1]}' has z")
    elif spec.exact_head and head is not None and spec.classes:
        _check_count(where, len(tensors[head]), classes)
    if names is not None and spec.exact_head:
        check_classes(where, names, classes)
    if not spec.exact_head and spec.logits:  # weights with other classes: the student gets a zero head
        tensors = {name: t for name, t in tensors.items() if name not in own or t.shape == own[name].shape}
        fresh = {name: torch.zeros_like(own[name]) for name in heads if name in own}
        same = names is None or [*map(nfc, names)] == [*map(nfc, classes)]
        tensors = {**fresh, **tensors} if same else {**tensors, **fresh}
    with without_meta_warnings():
        network.load_state_dict(tensors)
    return steps


def _see_grey(spec: Spec, network: nn.Module, config: dict[str, Any]) -> str:
    """Let a one-channel network accept RGB: its first layer gets the grey of the input."""
    # Normalization is then equal for all channels, so the weighted sum of normalized colours is the normalized grey.
    first = config_of(network).get("first_conv")
    layer = dict(network.named_modules()).get(first if isinstance(first, str) else "")
    if not isinstance(layer, nn.Conv2d) or layer.in_channels != 1:
        wrong = f"has in_chans=1, but the first layer of '{spec.model}' is no convolution of one channel"
        raise ModelError(f"{spec.where}.args", wrong, "A network that begins with one", "Leave in_chans out")
    shares = torch.tensor(LUMA, device=layer.weight.device).view(1, 3, 1, 1)
    layer.weight, layer.in_channels = nn.Parameter(layer.weight.detach() * shares), 3
    for key in ("mean", "std"):
        own = config[key] if len(config[key]) == 3 else [config[key][0]] * 3
        config[key] = [sum(share * one for share, one in zip(LUMA, own, strict=True))] * 3
    return f"it sees the grey of a photograph, with mean {config['mean'][0]:.3f} and std {config['std'][0]:.3f}"


def _take(spec: Spec, network: nn.Module, weights: Weights) -> Taken:
    name = config_of(network).get("architecture") or spec.model
    return take(weights, network, name, spec.weights, _head_names(network), not spec.logits)


def _head_names(network: nn.Module) -> list[str]:
    """Return the names of the weights, then of the biases, of the layers that compute the logits."""
    count = getattr(network, "num_classes", 0)
    found = getattr(network, "get_classifier", lambda: None)()
    heads = {id(layer) for one in (found if isinstance(found, tuple) else (found,)) if one for layer in one.modules()}
    names = {
        name
        for name, layer in network.named_modules()
        if id(layer) in heads and count in (getattr(layer, "out_features", 0), getattr(layer, "out_channels", 0))
    }
    return [f"{name}.{kind}" for kind in ("weight", "bias") for name in sorted(names) or ["head"]]
