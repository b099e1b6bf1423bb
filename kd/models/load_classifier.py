"""Load a timm model by name, local folder, safetensors file or hub id.

A class count that is not the data's is an error.
"""

import json
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from kd.models.classifier import REORDERED, Classifier, Preprocessing, head_modules
from kd.models.fitting import TensorSet, config_of, match_state_dict
from kd.models.spec import Spec

FIT = (
    "it to this data: teacher.pretrained=true with teacher.fit.epochs; or learn its"
    " features: losses=[{kind: cosine}]"
)
FITTED = (
    "Name all of its outputs in a file, one a line (teacher.classes=FILE); or fit"
    f" {FIT}"
)
# weights of red, green and blue in grey (ITU-R BT.601, as in Pillow)
LUMA = (0.299, 0.587, 0.114)


def load(spec: Spec, image_size: int, features: Collection[str] = ()) -> Classifier:
    """Build a model with its weights.

    If its input size is free, it is `image_size`, the side of the data's images.
    """
    source = _timm_source(spec)
    weights = None
    recorded: dict[str, Any] = {}
    trained: dict[str, Any] = {}
    if spec.checkpoint:
        weights = checkpoints.read_weights(
            f"{spec.config_path}.checkpoint", spec.checkpoint
        )
        recorded = _recorded_pixels(spec, weights.trainer)
        trained = _unset_arguments(spec, weights)
        spec = replace(spec, args={**trained, **spec.args})
    image_size = recorded.get("input_size", (image_size,))[-1]
    if not spec.logits:
        spec = replace(spec, exact_head=False)
    pretrained = spec.pretrained and weights is None
    own_classes = tensor_set = None
    if spec.classes is None:
        own_classes, tensor_set = _own_class_names(spec, source, weights, image_size)
    _require_source(spec, source, pretrained)
    count = len(spec.classes or own_classes or ())
    network, sized = _build_network(spec, source, pretrained, image_size, count)
    classes = _class_names(network, spec.classes, own_classes)
    _require_meaning(spec, source)
    steps: tuple[str, ...] = ()
    if weights is not None:
        steps = _load_weights(spec, network, weights, tensor_set)
    elif pretrained and spec.classes:
        steps = _settle_pretrained_head(spec, network)
    config = timm_folder.data_config(network, recorded)
    if recorded or trained:
        names = ", ".join([*recorded, *trained])
        steps += (f"kd uses the {names} that its trainer wrote",)
    steps += _see_grey(spec, network, config)
    fixed = {"pretrained_cfg", "pretrained_cfg_overlay", "img_size"} & spec.args.keys()
    free = sized if config_of(network).get("fixed_input_size") else spec.free_size
    if "input_size" in recorded or fixed or not free:
        image_size = config["input_size"][-1]
    classifier = Classifier(
        _in_fast_layout(network),
        num_classes=len(classes),
        input_size=image_size,
        mean=config["mean"],
        std=config["std"],
        features=features,
        architecture=_architecture(spec, source),
        classes=classes,
    )
    if steps:
        classifier.notes = (f"'{spec.checkpoint or spec.model}': {'; '.join(steps)}",)
    if spec.exact_head and pretrained:
        classifier.preprocessing = _preprocessing(config)
    return classifier


def _unset_arguments(spec: Spec, weights: Weights) -> dict[str, Any]:
    """Return the arguments of a trainer that the configuration does not set."""
    return {
        key: value
        for key, value in weights.arguments(spec.model).items()
        if key not in spec.args
    }


def _class_names(
    network: nn.Module, required: Sequence[str] | None, recorded: Sequence[str] | None
) -> Sequence[str]:
    if required is not None:
        return required
    names = recorded or config_of(network).get("label_names")
    return names or _numbered_classes(getattr(network, "num_classes", 0))


def _numbered_classes(count: int) -> list[str]:
    return [f"class_{label}" for label in range(count)]


def _require_meaning(spec: Spec, source: str) -> None:
    """Require that a folder's logits have the meaning that the losses expect."""
    if spec.exact_head and (spec.checkpoint or source.startswith("local-dir:")):
        folder = _folder_of(spec.checkpoint or source)
        folder = folder if folder.is_dir() else folder.parent
        content = timm_folder.folder_config(folder)
        spec.require_meaning(content.get("problem_type") or "")


def _recorded_pixels(spec: Spec, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trainer's arguments about pixels that the configuration does not set.

    They are in the form of timm's loader.
    """
    side = trainer.get("input_size", trainer.get("img_size"))
    side = side[-1] if isinstance(side, (list, tuple)) else side
    recorded = {
        "mean": trainer.get("mean"),
        "std": trainer.get("std"),
        "input_size": side and (3, side, side),
    }
    configured = {**spec.args, **spec.args.get("pretrained_cfg_overlay", {})}
    # a student, and a teacher to fit, see the data's size
    if "img_size" in configured or not spec.exact_head:
        del recorded["input_size"]
    return {
        key: value
        for key, value in recorded.items()
        if key not in configured and isinstance(value, (list, tuple))
    }


def _in_fast_layout(network: nn.Module) -> nn.Module:
    """Convert a convolutional network to channels-last memory format."""
    # On one AMD EPYC core in bfloat16 a training step then takes 0.89 of the time for a
    # ResNet-18 at 64 px, and 0.70 for a ResNet-10 with 24 channels
    # (benchmarks/layout.py). Not for 5-dimensional weights (lambda_resnet).
    convolved = sum(
        layer.weight.numel()
        for layer in network.modules()
        if isinstance(layer, nn.Conv2d)
    )
    parameters = list(network.parameters())
    if 2 * convolved < sum(parameter.numel() for parameter in parameters):
        return network
    if any(parameter.dim() == 5 for parameter in parameters):
        return network
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _preprocessing(config: dict[str, Any]) -> Preprocessing:
    from timm.data import create_transform

    keys = ("input_size", "crop_pct", "crop_mode", "interpolation")
    text = ", ".join(f"{key} {config[key]}" for key in keys if key in config)
    return Preprocessing("timm", create_transform(**config, is_training=False), text)  # type: ignore[arg-type]


def built_bare(
    config_path: str, model: str, args: Mapping[str, Any]
) -> tuple[nn.Module, list[str]]:
    """Return a timm network without weights, and the names of its classifier."""
    spec = Spec(config_path, model, {**args}, None)
    network, _ = _build_network(spec, _timm_source(spec), False, 0, 0)
    return network, _head_names(network)


def _folder_of(source: str) -> Path:
    return Path(source.removeprefix("local-dir:"))


def _timm_source(spec: Spec) -> str:
    """Return the name in timm's form.

    It is a registered name, `local-dir:FOLDER` or `hf-hub:ID`.
    """
    import timm

    name = spec.model
    if name.startswith(("hf-hub:", "hf_hub:")):
        return name
    folder = _folder_of(name)
    if (folder / "config.json").is_file():
        return f"local-dir:{folder}"
    if name.startswith("local-dir:"):
        remedy = "Point at a folder written by `kd-export` or timm.models.save_for_hf"
        raise ModelError(
            f"{spec.config_path}.model", f"no config.json in '{folder}'", "", remedy
        )
    try:
        registered = timm.is_model(name.partition(".")[0])
        timm.get_pretrained_cfg(name)
    except RuntimeError:  # of this model, but not with this tag
        registered = False
    if not registered:
        near = did_you_mean(name, [*timm.list_models(), *timm.list_pretrained()])
        allowed = "A timm model name, a folder with config.json, or hf-hub:owner/name"
        remedy = (
            near
            or "List names with `python -c 'import timm; print(timm.list_models())'`"
        )
        raise ModelError(
            f"{spec.config_path}.model", f"no model '{name}'", allowed, remedy
        )
    return name


def require_weights(spec: Spec) -> None:
    """Require that the weights for `load` exist or can be fetched.

    Nothing is downloaded.
    """
    if spec.checkpoint:
        checkpoints.weight_files(f"{spec.config_path}.checkpoint", spec.checkpoint)
    else:
        _require_source(spec, _timm_source(spec), spec.pretrained)


def _require_source(spec: Spec, source: str, pretrained: bool) -> None:
    if source.startswith("local-dir:"):
        if pretrained or spec.args.get("pretrained"):
            folder = _folder_of(source)
            # other formats are pickles: loading may run their code
            if not (folder / "model.safetensors").is_file():
                allowed = (
                    "Weights as safetensors; other formats may run code when they are"
                    " loaded"
                )
                remedy = (
                    "Write it anew with `kd-export` or timm.models.save_for_hf(...,"
                    " safe_serialization=True)"
                )
                raise ModelError(
                    f"{spec.config_path}.model",
                    f"no model.safetensors in '{folder}'",
                    allowed,
                    remedy,
                )
    elif pretrained or ":" in source:
        endings = timm_folder.WEIGHTS if pretrained else timm_folder.ARCHITECTURE
        timm_folder.require_fetched(f"{spec.config_path}.model", source, endings)


def _architecture(spec: Spec, source: str) -> dict[str, Any]:
    """Return the model's name and its arguments, independent of its folder."""
    if not source.startswith("local-dir:"):
        return {"model": source, "args": spec.args}
    content = timm_folder.folder_config(_folder_of(source), f"{spec.config_path}.model")
    return {
        "model": content.get("architecture"),
        "args": {**content.get("model_args", {}), **spec.args},
    }


def _own_class_names(
    spec: Spec, source: str, weights: Weights | None, image_size: int
) -> tuple[list[str] | None, TensorSet | None]:
    """Return the names of a model's own classes, and the tensors read for them.

    The tensors are None if timm has the names.
    """
    names = weights.classes if weights is not None else None
    if not names and ":" in source:
        names = timm_folder.folder_classes(_folder_of(source))
    # without a file timm builds the head of its pretrained weights
    if names or (spec.pretrained and weights is None):
        return names, None
    if weights is None:
        wrong = (
            f"'{spec.model}' names no classes, and neither does the data"
            " (data.labels=none)"
        )
        allowed = "A checkpoint in a folder with label_names, as kd-export writes it"
        remedy = "Choose such a teacher, or take losses on features"
        raise ModelError(f"{spec.config_path}.checkpoint", wrong, allowed, remedy)
    # the classifier's name comes from the network, its number of rows from the file
    with torch.device("meta"):
        bare, _ = _build_network(spec, source, False, image_size, 0)
    tensor_set = _match_weights(spec, bare, weights)
    tensors = tensor_set.tensors
    rows = (len(tensors[name]) for name in _head_names(bare) if name in tensors)
    count = next(rows, 0)
    if count == 1 and spec.softmax:
        count = 2
    return _numbered_classes(count), tensor_set


def _build_network(
    spec: Spec, source: str, pretrained: bool, image_size: int, count: int
) -> tuple[nn.Module, bool]:
    """Build the network; also return whether it was built for `image_size`."""
    import timm

    args = dict(spec.args)
    if count or spec.classes is not None:
        args["num_classes"] = count
    if source.startswith("local-dir:") and not pretrained:
        args.setdefault("pretrained", False)
    last = Exception()
    # A model with a free input size (ViT) is built for the data's; others refuse the
    # argument and resize.
    stored = source.startswith(("local-dir:", "hf-hub:", "hf_hub:"))
    tries: list[dict[str, Any]] = [{}]
    if image_size and not stored and "img_size" not in args:
        tries = [{"img_size": image_size}, {}]
    # an argument of timm's ViTs; others refuse it
    if spec.any_size and "dynamic_img_size" not in args:
        tries = [{**sized, "dynamic_img_size": True} for sized in tries] + tries
    for sized in tries:
        try:
            with without_meta_warnings():
                network = timm.create_model(
                    source, **{"pretrained": pretrained, **args, **sized}
                )
            return network, "img_size" in sized
        # timm raises many types; all are caused by name, arguments or config.json
        except Exception as error:
            last = error
            if not isinstance(error, TypeError):
                break
    reason = " ".join(str(last).split())[:300]
    allowed = f"Arguments given: {json.dumps(spec.args)}" if spec.args else ""
    wrong = f"'{spec.model}' cannot be built ({type(last).__name__}: {reason})"
    remedy = f"Correct {spec.config_path}.model or {spec.config_path}.args"
    raise ModelError(f"{spec.config_path}.model", wrong, allowed, remedy) from last


@contextmanager
def without_meta_warnings() -> Iterator[None]:
    """Suppress a warning of tensors that are not copied on the meta device.

    Weights are only compared there, and torch warns of each.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "for .*: copying from a non-meta parameter", UserWarning
        )
        yield


def _settle_pretrained_head(spec: Spec, network: nn.Module) -> tuple[str, ...]:
    """Refuse a teacher's weights with another class list; report the changes.

    timm takes a random head for it.
    """
    config = config_of(network)
    names = config.get("label_names")
    folder = _folder_of(spec.model)
    if not names and folder.is_dir():
        names = timm_folder.folder_classes(folder)
    config_path = f"{spec.config_path}.model"
    rows = _head_rows(config_path, spec, config.get("num_classes"), names)
    for name, tensor in network.state_dict().items():
        if name in _head_names(network):
            tensor.copy_(tensor[rows] if rows else torch.zeros_like(tensor))
    return (REORDERED,) if rows != sorted(rows) else ()


def _head_rows(
    config_path: str, spec: Spec, count: int | None, names: Sequence[str] | None
) -> list[int]:
    """Return the rows of a classifier for the data's classes.

    They are [] if a student's has other classes and begins with zeros.
    """
    # timm's random head starts an EfficientNet at a cross-entropy of 9.4.
    classes = [*map(nfc, spec.classes or ())]
    model_classes = [*map(nfc, names or classes)]
    if spec.exact_head:
        _check_count(config_path, count, classes)
        check_classes(config_path, sorted(model_classes), sorted(classes))
    elif model_classes != classes or count not in (None, len(classes)):
        return []
    return [model_classes.index(name) for name in classes]


def check_classes(
    config_path: str, names: Sequence[str], classes: Sequence[str]
) -> None:
    """Require the model's class names to equal the data's, in the same order."""
    _check_count(config_path, len(names), classes)
    names = [*map(nfc, names)]
    classes = [*map(nfc, classes)]
    for i, (name, expected) in enumerate(zip(names, classes, strict=True)):
        if name != expected:
            wrong = f"class {i} is '{name}', the data's is '{expected}'"
            if {*names} == {*classes}:
                wrong += " (the same classes in another order)"
            in_file = config_path.endswith(".classes")
            remedy = "Correct the names in the file" if in_file else FITTED
            raise ModelError(config_path, wrong, "The data's classes", remedy)


def _check_count(config_path: str, count: int | None, classes: Sequence[str]) -> None:
    if count is not None and count != len(classes):
        wrong = f"has {count} classes, the data has {len(classes)}"
        remedy = FITTED
        if config_path.startswith("student"):
            remedy = (
                f"Set the number in {config_path.partition('.')[0]}.args, or take a"
                " model of these classes"
            )
        raise ModelError(
            config_path, wrong, "Both must be equal: a new head would be random", remedy
        )


def _load_weights(
    spec: Spec, network: nn.Module, weights: Weights, tensor_set: TensorSet | None
) -> tuple[str, ...]:
    """Load a file's tensors with its classifier; report the changes.

    The classifier is zeros for a student of other classes.
    """
    _, tensors, steps = tensor_set or _match_weights(spec, network, weights)
    state = network.state_dict()
    heads = _head_names(network)
    head = next((name for name in heads if name in tensors), None)
    if spec.exact_head and head is None and heads[0] in state:
        wrong = "; ".join([f"'{weights.file}' has no classifier", *steps])
        raise ModelError(
            weights.config_path,
            wrong,
            "Weights with one for losses on logits",
            f"Fit {FIT}",
        )
    count = len(tensors[head]) if head is not None else 0
    if spec.exact_head and count == 1 and spec.softmax and len(state[heads[0]]) == 2:
        tensors |= {
            name: torch.cat([torch.zeros_like(tensors[name]), tensors[name]])
            for name in heads
            if name in state
        }
        count = 2
        names = [*(spec.classes or weights.classes or ()), "class_1", "class_1"]
        steps = (*steps, f"its one logit z became [0, z]: '{names[1]}' has z")
    if spec.classes and (head is not None or not spec.exact_head):
        rows = _head_rows(weights.config_path, spec, count, weights.classes)
        tensors |= {
            name: tensors[name][rows] if rows else torch.zeros_like(state[name])
            for name in heads
            if name in state
        }
        if rows != sorted(rows):
            steps = (*steps, REORDERED)
    with without_meta_warnings():
        network.load_state_dict(tensors)
    return steps


def _see_grey(
    spec: Spec, network: nn.Module, config: dict[str, Any]
) -> tuple[str, ...]:
    """Let a one-channel network accept RGB; report the change.

    Its first layer gets the grey of the input.

    Its first layer gets the grey of the input.
    """
    # Normalization is then equal for all channels, so the weighted sum of normalized
    # colours is the normalized grey.
    if not spec.exact_head or spec.args.get("in_chans") != 1:
        return ()
    first = config_of(network).get("first_conv")
    layer = dict(network.named_modules()).get(first if isinstance(first, str) else "")
    if not isinstance(layer, nn.Conv2d) or layer.in_channels != 1:
        wrong = (
            f"has in_chans=1, but the first layer of '{spec.model}' is no convolution"
            " of one channel"
        )
        raise ModelError(
            f"{spec.config_path}.args",
            wrong,
            "A network that begins with one",
            "Leave in_chans out",
        )
    shares = torch.tensor(LUMA, device=layer.weight.device).view(1, 3, 1, 1)
    layer.weight = nn.Parameter(layer.weight.detach() * shares)
    layer.in_channels = 3
    for key in ("mean", "std"):
        values = zip(LUMA, [*config[key]] * 3, strict=False)
        config[key] = [sum(share * value for share, value in values)] * 3
    return (
        f"it sees the grey of a photograph, with mean {config['mean'][0]:.3f} and std"
        f" {config['std'][0]:.3f}",
    )


def _match_weights(spec: Spec, network: nn.Module, weights: Weights) -> TensorSet:
    name = config_of(network).get("architecture") or spec.model
    return match_state_dict(
        weights, network, name, spec.weights, _head_names(network), not spec.logits
    )


def _head_names(network: nn.Module) -> list[str]:
    """Return the names of the weights, then of the biases, of the classifier layers."""
    count = getattr(network, "num_classes", 0)
    heads = {layer for module in head_modules(network) for layer in module.modules()}
    names = []
    for name, layer in network.named_modules():
        widths = (getattr(layer, key, 0) for key in ("out_features", "out_channels"))
        if layer in heads and count in widths:
            names.append(name)
    return [
        f"{name}.{kind}"
        for kind in ("weight", "bias")
        for name in sorted(names) or ["head"]
    ]
