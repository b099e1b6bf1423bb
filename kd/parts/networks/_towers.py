"""Load transformers models from a folder or the hub: configuration, preprocessing,
weights, one output.
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

from kd.core.errors import ModelError, error_summary, import_optional
from kd.core.types import Outputs
from kd.models.checkpoints import require_no_adapter
from kd.models.classifier import Classifier
from kd.models.spec import Spec
from kd.parts.networks._processor import Preparation, measure, read_processor

CLASSIFIER = "ForImageClassification"  # part of the name of a class with a classifier
HEADS = ("classifier", "head", "fc")  # endings of the names of their last layers


def library(config_path: str) -> Any:
    wrong, remedy = (
        "needs the package transformers, which is not installed",
        "pip install 'PATH/kd[transformers]'",
    )
    return import_optional("transformers", f"{config_path}.kind", wrong, remedy)


@contextmanager
def quiet(hub: Any) -> Iterator[None]:
    """Suppress transformers' reports and progress bars: problems are errors here."""
    logger = logging.getLogger("transformers")
    level, bars = logger.level, hub.utils.logging.is_progress_bar_enabled()
    logger.setLevel(logging.CRITICAL)
    hub.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            hub.utils.logging.enable_progress_bar()


def refused(spec: Spec, error: Exception) -> ModelError:
    wrong = f"'{spec.model}' cannot be loaded ({error_summary(error)})"
    allowed = (
        "A folder that save_pretrained wrote, or an id on the hub; weights as"
        " safetensors"
    )
    return ModelError(
        f"{spec.config_path}.model",
        wrong,
        allowed,
        "Check the name; an id on the hub needs the network",
    )


def read_config(spec: Spec, hub: Any) -> Any:
    """Return the configuration of a model, with `args` on top."""
    if spec.checkpoint:
        wrong, remedy = (
            "is set, but the folder or the hub id brings its weights",
            "Leave checkpoint out",
        )
        raise ModelError(f"{spec.config_path}.checkpoint", wrong, "", remedy)
    if "trust_remote_code" in spec.args:
        wrong = "has trust_remote_code, which runs code of the model's folder"
        remedy = "Leave it out; teacher.kind=torch runs a function of your own"
        raise ModelError(
            f"{spec.config_path}.args", wrong, "A model that transformers knows", remedy
        )
    require_no_adapter(f"{spec.config_path}.model", Path(spec.model))
    try:
        with quiet(hub):
            config = hub.AutoConfig.from_pretrained(spec.model, **spec.args)
    except (
        Exception
    ) as error:  # transformers raises many types, all caused by the folder
        raise refused(spec, error) from error
    if config.model_type == "timm_wrapper":
        wrong = (
            f"'{spec.model}' wraps a network of timm"
            f" ({getattr(config, 'architecture', '?')})"
        )
        remedy = (
            "Save its `model.timm_model` with timm.models.save_for_hf, and set"
            f" {spec.config_path}.kind=timm"
        )
        raise ModelError(
            f"{spec.config_path}.model",
            wrong,
            "A network that transformers itself implements",
            remedy,
        )
    return config


def vision_config(config: Any) -> Any:
    """Return the configuration of the image tower, with the whole model's projection
    width.
    """
    vision = getattr(config, "vision_config", config)
    if hasattr(config, "projection_dim"):
        vision.projection_dim = config.projection_dim
    return vision


def preprocessing(
    spec: Spec, hub: Any, config: Any, image_size: int
) -> tuple[dict[str, Any], Preparation]:
    """Return `input_size`, `mean` and `std` for a Classifier, and the effect of the
    model's own processor.
    """
    with quiet(hub):
        found = measure(spec, read_processor(spec, hub))
    own = getattr(vision_config(config), "image_size", None)
    size = found.size or (own if isinstance(own, int) else image_size)
    return {"input_size": size, "mean": found.mean, "std": found.std}, found


def loaded(spec: Spec, hub: Any, auto: str, config: Any) -> nn.Module:
    """Return a model with all of its weights, in eval mode; on the meta device if no
    weights are needed.
    """
    # `spec.pretrained` is False if another rank has the weights.
    cls: Any = getattr(hub, auto)
    try:
        with quiet(hub):
            if not spec.pretrained:
                return (cls.from_config if hasattr(cls, "from_config") else cls)(
                    config
                ).eval()
            model, report = cls.from_pretrained(
                spec.model,
                config=config,
                use_safetensors=True,
                output_loading_info=True,
                dtype=torch.float32,
            )
    except (
        Exception
    ) as error:  # transformers raises many types, all caused by the folder
        raise refused(spec, error) from error
    missing = sorted(
        name for name in report["missing_keys"] if not name.startswith("pooler.")
    )
    other = sorted(
        str(one[0] if isinstance(one, tuple) else one)
        for one in report["mismatched_keys"]
    )
    if missing or other:
        names = ", ".join([*missing, *other][:3])
        wrong = (
            f"'{spec.model}' lacks {len(missing) + len(other)} weights of a"
            f" {type(model).__name__} ({names})"
        )
        raise ModelError(
            f"{spec.config_path}.model",
            wrong,
            "They would be random",
            "Choose a model with these weights",
        )
    if any(name.startswith("pooler.") for name in report["missing_keys"]):
        model.pooler = None  # its weights would be random
    return model.eval()


class Tower(nn.Module):
    """A transformers model as a network from normalized pixels [B, 3, S, S] to one
    tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        order: Sequence[int] = (0, 1, 2),
        patch: int = 0,
        pick: nn.Module | None = None,
    ) -> None:
        """Wrap a model; `order`: the image channel at each input position; `patch`:
        patch side, 0: no patches.
        """
        super().__init__()
        self.model, self.order, self.patch, self.pick = (
            model,
            list(order),
            patch,
            pick or nn.Identity(),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits [B, C], or the pooled features [B, D] of a model without
        classes.
        """
        output = self._ask(self.model, pixels)
        return (
            self._logits(output)
            if CLASSIFIER in type(self.model).__name__
            else self._pooled(output, pixels)
        )

    def described(self, pixels: Tensor, names: tuple[str, ...]) -> Outputs:
        """Return logits [B, C] (width 0 without classes) and the named features."""
        if CLASSIFIER in type(self.model).__name__:
            logits_BC, pooled_BD, last = self._classified(pixels)
        else:
            hidden: list[Any] = []  # CLIP's projected output has no tokens
            inner: Any = getattr(self.model, "vision_model", self.model)
            hook = inner.register_forward_hook(
                lambda _, inputs, output: hidden.append(output.last_hidden_state)
            )
            pooled_BD = self.forward(pixels)
            hook.remove()
            logits_BC, last = pooled_BD.new_zeros(len(pooled_BD), 0), hidden[0]
        features = {"pooled": pooled_BD} if "pooled" in names else {}
        if "tokens" in names:
            maps = (
                last.flatten(2).transpose(1, 2)
                if last.ndim == 4
                else last[:, -self._places(last, pixels) :]
            )
            features["tokens"] = maps
        return Outputs(logits_BC, features)

    def _logits(self, output: Any) -> Tensor:  # another name in PP-LCNet
        return self.pick(
            output.logits if hasattr(output, "logits") else output.last_hidden_state
        )

    def _ask(self, model: Any, pixels: Tensor) -> Any:
        if self.order != [0, 1, 2]:
            pixels = pixels[:, self.order]
        if hasattr(model, "get_image_features"):
            output = model.get_image_features(pixel_values=pixels)
            return (
                SimpleNamespace(pooler_output=output)
                if isinstance(output, Tensor)
                else output
            )
        return model(pixel_values=pixels)

    def _classified(self, pixels: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return logits, the classifier's input (the mean of two), and the backbone's
        output.
        """
        inner: Any = self.model
        heads = [
            one
            for name, one in inner.named_children()
            if name.endswith(HEADS) and [*one.parameters()]
        ]
        head_inputs: list[Tensor] = []
        outputs: list[Any] = []
        hooks = [
            head.register_forward_pre_hook(
                lambda _, inputs: head_inputs.append(inputs[0])
            )
            for head in heads
        ]
        backbone = [one for one in inner.children() if one not in heads]
        hooks += [
            one.register_forward_hook(lambda _, inputs, output: outputs.append(output))
            for one in backbone
        ]
        logits_BC = self._logits(self._ask(inner, pixels))
        for hook in hooks:
            hook.remove()
        last = [
            one.last_hidden_state
            for one in outputs
            if hasattr(one, "last_hidden_state")
        ]
        if not head_inputs or not last:
            wrong = (
                f"'{type(inner).__name__}' has no vector of features before its"
                " classifier, which a loss needs"
            )
            raise ModelError(
                "losses", wrong, "Losses on logits", "Take others, or another teacher"
            )
        vectors = [
            one.mean(1) if one.ndim == 3 else one.flatten(1) for one in head_inputs
        ]
        return logits_BC, torch.stack(vectors).mean(0), last[-1]

    def _pooled(self, output: Any, pixels: Tensor) -> Tensor:
        for name in ("image_embeds", "pooler_output"):
            value = getattr(output, name, None)
            if value is not None:
                return value.flatten(1)
        last = output.last_hidden_state
        if last.ndim == 3 and last.shape[1] > self._places(last, pixels):
            return last[:, 0]
        return last.mean(1) if last.ndim == 3 else last.mean((2, 3))

    def _places(self, last: Tensor, pixels: Tensor) -> int:
        """Return the number of patch tokens in [B, N, D]; class and register tokens
        come first.
        """
        patches = (
            (pixels.shape[-2] // self.patch) * (pixels.shape[-1] // self.patch)
            if self.patch
            else last.shape[1]
        )
        return min(
            patches, math.isqrt(last.shape[1]) ** 2
        )  # a square image has a square grid


class TowerTeacher(Classifier):
    """A transformers model with its normalization and input size. See
    `kd.core.contracts.TeacherModel`.
    """

    network: Tower

    def outputs(self, pixels: Tensor) -> Outputs:
        return (
            self.network.described(pixels, self.features)
            if self.features
            else super().outputs(pixels)
        )
