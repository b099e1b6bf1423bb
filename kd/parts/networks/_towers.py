"""Load transformers models from a folder, the hub or an architecture's name.

Each becomes a network with one output.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from kd.core.errors import ModelError, did_you_mean, error_summary, import_optional
from kd.core.types import Outputs
from kd.models.checkpoints import require_no_adapter
from kd.models.classifier import Classifier
from kd.models.spec import Spec
from kd.models.timm_folder import (
    ARCHITECTURE,
    WEIGHTS,
    folder_config,
    require_fetched,
)
from kd.parts.networks._processor import (
    IMAGENET,
    Preparation,
    has_processor,
    measure_processor,
    read_processor,
)

IMAGE_TOWERS = {"clip": "CLIPVisionModelWithProjection", "siglip": "SiglipVisionModel"}
CLASSIFIER = "ForImageClassification"  # part of the name of a class with a classifier
HEADS = ("classifier", "head", "fc")  # endings of the names of their last layers
EXPORTED = "transformers"  # key of the architecture in config.json of kd-export
UNDECAYED = {"*_token", "*_tokens", "*position_*", "*.bias", "*layer_scale*"}
"""Patterns of parameters without weight decay, beside vectors: those that timm's vision
transformers exempt, under transformers' names.
"""


def library(config_path: str) -> Any:
    wrong = "needs the package transformers, which is not installed"
    remedy = "pip install 'PATH/kd[transformers]'"
    return import_optional("transformers", f"{config_path}.kind", wrong, remedy)


@contextmanager
def quiet(hub: Any) -> Iterator[None]:
    """Suppress transformers' reports and progress bars: problems are errors here."""
    logger = logging.getLogger("transformers")
    level = logger.level
    shows_bars = hub.utils.logging.is_progress_bar_enabled()
    logger.setLevel(logging.CRITICAL)
    hub.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if shows_bars:
            hub.utils.logging.enable_progress_bar()


def _loading_error(spec: Spec, error: Exception) -> ModelError:
    if spec.free_size and (spec.args or "/" not in spec.model):
        wrong = f"'{spec.model}' cannot be built ({error_summary(error)})"
        section = spec.config_path
        remedy = f"Correct {section}.model or {section}.args"
        return ModelError(f"{section}.args", wrong, f"Given: {spec.args}", remedy)
    wrong = f"'{spec.model}' cannot be loaded ({error_summary(error)})"
    allowed = (
        "A folder that save_pretrained wrote, or an id on the hub; weights as"
        " safetensors"
    )
    remedy = "Check the name; an id on the hub needs the network"
    return ModelError(f"{spec.config_path}.model", wrong, allowed, remedy)


def read_config(spec: Spec, hub: Any) -> Any:
    """Return the configuration of a model, with `args` on top."""
    if spec.checkpoint and spec.config_path != "student":
        wrong = "is set, but the folder or the hub id brings its weights"
        config_path = f"{spec.config_path}.checkpoint"
        raise ModelError(config_path, wrong, "", "Leave checkpoint out")
    if "trust_remote_code" in spec.args:
        wrong = "has trust_remote_code, which runs code of the model's folder"
        allowed = "A model that transformers knows"
        remedy = "Leave it out; teacher.kind=torch runs a function of your own"
        raise ModelError(f"{spec.config_path}.args", wrong, allowed, remedy)
    _require_folder(spec)
    require_no_adapter(f"{spec.config_path}.model", Path(spec.model))
    exported = read_exported(spec)
    named = names_architecture(spec, hub)
    if not (named or Path(spec.model).is_dir()):  # transformers tries for 20 s
        place = f"{spec.config_path}.model"
        require_fetched(place, f"hf-hub:{spec.model}", (*WEIGHTS, *ARCHITECTURE))
    try:
        with quiet(hub):
            if exported or named:
                config, unknown = _build_config(spec, hub, exported)
            else:
                config, unknown = hub.AutoConfig.from_pretrained(
                    spec.model,
                    return_unused_kwargs=True,
                    trust_remote_code=False,
                    **spec.args,
                )
    # transformers raises many types, all caused by the folder
    except Exception as error:
        raise _loading_error(spec, error) from error
    for key in unknown:
        wrong = f"has '{key}', which is no key of a {type(config).__name__}"
        common = hub.PretrainedConfig().to_dict()
        keys = sorted(type(config)().to_dict().keys() - common)
        remedy = did_you_mean(key, keys) or "Leave it out"
        allowed = f"Its keys: {', '.join(keys)}"
        raise ModelError(f"{spec.config_path}.args", wrong, allowed, remedy)
    if config.model_type == "timm_wrapper":
        wrong = (
            f"'{spec.model}' wraps a network of timm"
            f" ({getattr(config, 'architecture', '?')})"
        )
        remedy = (
            "Save its `model.timm_model` with timm.models.save_for_hf, and set"
            f" {spec.config_path}.kind=timm"
        )
        allowed = "A network that transformers itself implements"
        raise ModelError(f"{spec.config_path}.model", wrong, allowed, remedy)
    return config


def _require_folder(spec: Spec) -> None:
    """Refuse a path where nothing is; a hub id is owner/name."""
    is_path = spec.model.startswith((".", "~", "/")) or spec.model.count("/") > 1
    if is_path and not Path(spec.model).is_dir():
        wrong = f"there is no folder '{spec.model}'"
        allowed = "A folder that save_pretrained or kd-export wrote, or a hub id"
        raise ModelError(f"{spec.config_path}.model", wrong, allowed, "Check the path")


def names_architecture(spec: Spec, hub: Any) -> bool:
    """Return whether a model is the name of an architecture, which has no weights.

    A student's are random, or those of its checkpoint.
    """
    path = Path(spec.model)
    if path.exists() or "/" in spec.model:
        return False
    is_student = spec.config_path == "student"
    lacks_weights = spec.pretrained and not spec.checkpoint
    if is_student and not lacks_weights and spec.model in hub.CONFIG_MAPPING:
        return True
    config_path = f"{spec.config_path}.model"
    allowed = "A folder that save_pretrained wrote, or a hub id owner/name"
    if spec.model in hub.CONFIG_MAPPING:
        wrong = f"'{spec.model}' is an architecture, which has no weights"
        remedy = "Name a folder or a hub id"
        if spec.config_path == "student":
            remedy += f", or set {spec.config_path}.checkpoint to its weights"
        raise ModelError(config_path, wrong, allowed, remedy)
    if is_student:
        allowed += ", or an architecture of transformers, such as vit"
    remedy = did_you_mean(spec.model, hub.CONFIG_MAPPING) or "Correct the name"
    raise ModelError(config_path, f"no model '{spec.model}'", allowed, remedy)


def read_exported(spec: Spec) -> dict[str, Any]:
    """Return config.json of an export of kd; {} for another `model`.

    Raises:
        ModelError: it is an export of another kind.
    """
    folder = Path(spec.model)
    content = folder_config(folder, f"{spec.config_path}.model")
    architecture = content.get("architecture")
    if not isinstance(architecture, dict):  # of timm or of transformers
        return {}
    if EXPORTED not in architecture:
        wrong = f"'{spec.model}' is an export of a network of your own"
        remedy = f"Set {spec.config_path}.kind=torch, and checkpoint to its weights"
        allowed = "A network of transformers"
        raise ModelError(f"{spec.config_path}.model", wrong, allowed, remedy)
    return content


def _build_config(
    spec: Spec, hub: Any, exported: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return a configuration of an architecture or export, and unknown `args`."""
    recorded = exported.get("architecture", {}).get("config", {})
    config_class = hub.CONFIG_MAPPING[recorded.get("model_type", spec.model)]
    _, unknown = config_class.from_dict({}, return_unused_kwargs=True, **spec.args)
    config = config_class(**{**recorded, **spec.args})
    config.architectures = []  # transformers reads it
    if names := exported.get("label_names"):
        config.num_labels = len(names)
        config.id2label = dict(enumerate(names))
        mapped = hub.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[config_class]
        # DeiT and LeViT have two; `from_config`, which built it, takes the first
        model_class = mapped[0] if isinstance(mapped, tuple) else mapped
        config.architectures = [model_class.__name__]
    return config, unknown


def vision_config(config: Any) -> Any:
    """Return the configuration of the image tower, with the projection's width."""
    vision = getattr(config, "vision_config", config)
    if hasattr(config, "projection_dim"):
        vision.projection_dim = config.projection_dim
    return vision


def preprocessing(
    spec: Spec, hub: Any, config: Any, image_size: int
) -> tuple[dict[str, Any], Preparation]:
    """Return `input_size`, `mean` and `std` for a Classifier, and the preparation.

    A network with random weights takes ImageNet's mean and deviation where no processor
    has others.
    """
    preparation = IMAGENET
    if exported := read_exported(spec):
        preparation = exported_preparation(exported)
    elif not spec.free_size or has_processor(spec.model):
        with quiet(hub):
            preparation = measure_processor(spec, read_processor(spec, hub))
    size = getattr(vision_config(config), "image_size", None)
    if spec.free_size:
        size = max(size) if isinstance(size, (list, tuple)) else size
    elif spec.exact_head or "image_size" not in spec.args:
        size = preparation.size or size
    arguments = {
        "input_size": size if isinstance(size, int) else image_size,
        "mean": preparation.mean,
        "std": preparation.std,
    }
    return arguments, preparation


def exported_preparation(exported: dict[str, Any]) -> Preparation:
    """Return how an export prepares pixels."""
    pixels = exported["pretrained_cfg"]
    return Preparation(
        size=pixels["input_size"][-1],
        mean=tuple(pixels["mean"]),
        std=tuple(pixels["std"]),
        order=tuple(exported["architecture"].get("order", IMAGENET.order)),
    )


def classifiers(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's classifiers by name; a distilled one has two."""
    return {
        name: layer
        for name, layer in model.named_children()
        if name.endswith(HEADS) and [*layer.parameters()]
    }


def last_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model's classifiers that compute logits."""
    return [
        [layer for layer in head.modules() if hasattr(layer, "weight")][-1]
        for head in classifiers(model).values()
    ]


def load_model(spec: Spec, hub: Any, class_name: str, config: Any) -> nn.Module:
    """Return a model with all of its weights, in eval mode.

    They are random where another rank has them (`spec.pretrained` is False), or a
    checkpoint. A student may lack those of classifier and pooler.
    """
    is_student = spec.config_path == "student"
    model_class: Any = getattr(hub, class_name)
    try:
        with quiet(hub):
            if not spec.pretrained or spec.checkpoint:
                make = getattr(model_class, "from_config", model_class)
                return make(config).eval()
            model, report = model_class.from_pretrained(
                spec.model,
                config=config,
                use_safetensors=True,
                ignore_mismatched_sizes=is_student,
                output_loading_info=True,
                dtype=torch.float32,
            )
    # transformers raises many types, all caused by the folder
    except Exception as error:
        raise _loading_error(spec, error) from error
    mismatched = [
        str(key[0] if isinstance(key, tuple) else key)
        for key in report["mismatched_keys"]
    ]
    missing_keys = report["missing_keys"]
    pooler_keys = [key for key in missing_keys if key.startswith("pooler.")]
    lacking = sorted(key for key in missing_keys if key not in pooler_keys)
    lacking += sorted(mismatched)
    if is_student:
        new = tuple(f"{name}." for name in classifiers(model))
        lacking = [key for key in lacking if not key.startswith(new)]
    if lacking:
        wrong = (
            f"'{spec.model}' lacks {len(lacking)} weights of a"
            f" {type(model).__name__} ({', '.join(lacking[:3])})"
        )
        remedy = "Choose a model with these weights"
        raise ModelError(
            f"{spec.config_path}.model", wrong, "They would be random", remedy
        )
    if pooler_keys and not is_student:
        model.pooler = None  # its weights would be random
    return model.eval()


class Tower(nn.Module):
    """A transformers model from normalized pixels [B, 3, S, S] to one tensor."""

    model: Any

    def __init__(
        self,
        model: nn.Module,
        order: Sequence[int] = (0, 1, 2),
        patch: int = 0,
        pick: nn.Module | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            model: of transformers.
            order: the image channel at each input position.
            patch: side of a patch, pixels; 0: no patches.
            pick: selects logits.
        """
        super().__init__()
        self.model = model
        self.order = list(order)
        self.patch = patch
        self.pick = pick or nn.Identity()

    @property
    def fused_attn(self) -> bool | None:
        """Whether attention is torch's fused kernel, as a layer of timm says it.

        None: the model has no choice.
        """
        if not getattr(self.model, "_supports_sdpa", False):
            return None
        return self.model.config._attn_implementation == "sdpa"

    @fused_attn.setter
    def fused_attn(self, fused: bool) -> None:
        self.model.set_attn_implementation("sdpa" if fused else "eager")

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits [B, C], or pooled features [B, D] without classes."""
        output = self._predict(self.model, pixels)
        if self._classifies:
            return self._logits(output)
        return self._pooled(output, pixels)

    @property
    def _classifies(self) -> bool:
        return CLASSIFIER in type(self.model).__name__

    def with_features(self, pixels: Tensor, names: tuple[str, ...]) -> Outputs:
        """Return logits [B, C] (width 0 without classes) and the named features."""
        if self._classifies:
            logits_BC, pooled_BD, last = self._classified(pixels)
        else:
            hidden: list[Any] = []  # CLIP's projected output has no tokens
            inner: Any = getattr(self.model, "vision_model", self.model)
            hook = inner.register_forward_hook(
                lambda _, inputs, output: hidden.append(output.last_hidden_state)
            )
            pooled_BD = self.forward(pixels)
            hook.remove()
            logits_BC = pooled_BD.new_zeros(len(pooled_BD), 0)
            last = hidden[0]
        features = {"pooled": pooled_BD} if "pooled" in names else {}
        if "tokens" in names and last.ndim == 4:
            features["tokens"] = last.flatten(2).transpose(1, 2)
        elif "tokens" in names:
            features["tokens"] = last[:, -self._patch_count(last, pixels) :]
        return Outputs(logits_BC, features)

    @property
    def inner(self) -> nn.Module:
        """The model whose weights an export has under transformers' names.

        It is the tower itself where logits are selected: they are more than the model.
        """
        return self.model if isinstance(self.pick, nn.Identity) else self

    def no_weight_decay(self) -> set[str]:
        return UNDECAYED

    def get_classifier(self) -> list[nn.Module]:
        return last_layers(self.model) if self._classifies else []

    def _logits(self, output: Any) -> Tensor:  # another name in PP-LCNet
        return self.pick(
            output.logits if hasattr(output, "logits") else output.last_hidden_state
        )

    def _predict(self, model: Any, pixels: Tensor) -> Any:
        if self.order != [0, 1, 2]:
            pixels = pixels[:, self.order]
        if hasattr(model, "get_image_features"):
            output = model.get_image_features(pixel_values=pixels)
            if isinstance(output, Tensor):
                return SimpleNamespace(pooler_output=output)
            return output
        return model(pixel_values=pixels)

    def _classified(self, pixels: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return logits, the mean input of the classifiers, and the last maps."""
        inner: Any = self.model
        heads = [*classifiers(inner).values()]
        head_inputs: list[Tensor] = []
        outputs: list[Any] = []
        hooks = [
            head.register_forward_pre_hook(
                lambda _, inputs: head_inputs.append(inputs[0])
            )
            for head in heads
        ]
        hooks += [
            layer.register_forward_hook(
                lambda _, inputs, output: outputs.append(output)
            )
            for layer in inner.children()
            if layer not in heads
        ]
        logits_BC = self._logits(self._predict(inner, pixels))
        for hook in hooks:
            hook.remove()
        last = [
            output.last_hidden_state
            for output in outputs
            if hasattr(output, "last_hidden_state")
        ]
        if not head_inputs or not last:
            wrong = (
                f"'{type(inner).__name__}' has no vector of features before its"
                " classifier, which a loss needs"
            )
            remedy = "Take others, or another teacher"
            raise ModelError("losses", wrong, "Losses on logits", remedy)
        vectors = [
            features.mean(1) if features.ndim == 3 else features.flatten(1)
            for features in head_inputs
        ]
        return logits_BC, torch.stack(vectors).mean(0), last[-1]

    def _pooled(self, output: Any, pixels: Tensor) -> Tensor:
        for name in ("image_embeds", "pooler_output"):
            value = getattr(output, name, None)
            if value is not None:
                return value.flatten(1)
        last = output.last_hidden_state
        if last.ndim != 3:
            return last.mean((2, 3))
        if last.shape[1] > self._patch_count(last, pixels):
            return last[:, 0]
        return last.mean(1)

    def _patch_count(self, last: Tensor, pixels: Tensor) -> int:
        """Return the number of patch tokens in [B, N, D], which are the last ones."""
        tokens = last.shape[1]
        square = math.isqrt(tokens) ** 2  # a square image has a square grid
        if not self.patch:
            return square
        height, width = pixels.shape[-2:]
        return min((height // self.patch) * (width // self.patch), square)


class TowerClassifier(Classifier):
    """A transformers model with its preprocessing, a teacher or a student.

    See `kd.core.contracts.TeacherModel`.
    """

    network: Tower

    def outputs(self, pixels: Tensor) -> Outputs:
        if not self.features:
            return super().outputs(pixels)
        return self.network.with_features(pixels, self.features)

    @property
    def num_features(self) -> int:
        width = super().num_features
        if width or self.num_classes:
            return width
        weight = next(self.network.parameters())
        with torch.no_grad():
            pixels = weight.new_zeros(1, 3, self.input_size, self.input_size)
            return self.network(pixels).shape[1]
