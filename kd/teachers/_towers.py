"""Models of transformers, read from a folder or the hub: configuration, preprocessing, weights, one answer.

Not a part (the name begins with an underscore).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kd.errors import MissingExtra, ModelError
from kd.models.classifier import Classifier
from kd.models.load import Spec
from kd.types import Outputs

FAILURES = (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError)
"""What transformers raises for a folder or an id that it cannot use."""


def library(where: str) -> Any:
    """Import transformers.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        wrong, remedy = "needs the package transformers, which is not installed", "pip install 'kd[transformers]'"
        raise MissingExtra(f"{where}.kind", wrong, "", remedy) from error


@contextmanager
def quiet(hub: Any) -> Iterator[None]:
    """Keep transformers' reports and progress bars off the screen: what is wrong is an error here."""
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
    """Return the error for a folder or an id that transformers cannot use."""
    reason = " ".join(str(error).split())[:200]
    wrong = f"'{spec.model}' cannot be loaded ({type(error).__name__}: {reason})"
    allowed = "A folder that save_pretrained wrote, or an id on the hub; weights as safetensors"
    return ModelError(f"{spec.where}.model", wrong, allowed, "Check the name; an id on the hub needs the network")


def read_config(spec: Spec, hub: Any) -> Any:
    """Return the configuration of a model, with `args` on top.

    Raises:
        ModelError: there is none.
    """
    if spec.checkpoint:
        wrong, remedy = "is set, but the folder or the hub id brings its weights", "Leave checkpoint out"
        raise ModelError(f"{spec.where}.checkpoint", wrong, "", remedy)
    if "trust_remote_code" in spec.args:
        wrong = "has trust_remote_code, which runs code of the model's folder"
        remedy = "Leave it out; teacher.kind=torch runs a function of your own"
        raise ModelError(f"{spec.where}.args", wrong, "A model that transformers knows", remedy)
    try:
        with quiet(hub):
            return hub.AutoConfig.from_pretrained(spec.model, **spec.args)
    except FAILURES as error:
        raise refused(spec, error) from error


def vision_config(config: Any) -> Any:
    """Return the configuration of the image tower; its projection is as wide as the whole model's."""
    vision = getattr(config, "vision_config", config)
    if hasattr(config, "projection_dim"):
        vision.projection_dim = config.projection_dim
    return vision


def preprocessing(spec: Spec, hub: Any, config: Any) -> dict[str, Any]:
    """Return `input_size`, `mean` and `std` as a Classifier takes them, from the model's own preprocessing.

    Its crop and its filter are left out: kd shows every model the same square, resized bicubically.

    Raises:
        ModelError: the preprocessing is missing.
    """
    try:
        with quiet(hub):
            mixin = importlib.import_module("transformers.image_processing_base").ImageProcessingMixin
            found, _ = mixin.get_image_processor_dict(spec.model)
    except FAILURES as error:
        raise ModelError(
            f"{spec.where}.model",
            f"'{spec.model}' has no preprocessor_config.json, so that nothing says how pixels are normalized",
            "",
            "Write it there: AutoImageProcessor.from_pretrained(...).save_pretrained(folder)",
        ) from error
    factor = found.get("rescale_factor", 1 / 255) if found.get("do_rescale", True) else 1.0
    normal = found.get("do_normalize", True)
    mean = found.get("image_mean") or [0.5] * 3 if normal else [0.0] * 3
    std = found.get("image_std") or [0.5] * 3 if normal else [1.0] * 3
    size = found.get("crop_size") or found.get("size") or {}
    side = size if isinstance(size, int) else size.get("height") or size.get("shortest_edge") or 0
    own = getattr(getattr(config, "vision_config", config), "image_size", None)  # a ViT takes no other
    return {
        "input_size": int(own if isinstance(own, int) else side),
        "mean": [one / (255 * factor) for one in mean],  # a Classifier's are for pixels in 0..1
        "std": [one / (255 * factor) for one in std],
    }


def loaded(spec: Spec, hub: Any, auto: str, config: Any) -> nn.Module:
    """Return a model with all of its weights, in eval mode; without weights on the meta device where none are asked.

    Args:
        spec: `pretrained` False: another rank has the weights.
        hub: transformers.
        auto: the name of its class.
        config: of the model.

    Raises:
        ModelError: weights are missing: transformers would put random ones in their place.
    """
    cls: Any = getattr(hub, auto)
    try:
        with quiet(hub):
            if not spec.pretrained:
                return (cls.from_config if hasattr(cls, "from_config") else cls)(config).eval()
            model, report = cls.from_pretrained(
                spec.model, config=config, use_safetensors=True, output_loading_info=True, dtype=torch.float32
            )
    except FAILURES as error:
        raise refused(spec, error) from error
    missing = sorted(name for name in report["missing_keys"] if not name.startswith("pooler."))
    other = sorted(str(one[0] if isinstance(one, tuple) else one) for one in report["mismatched_keys"])
    if missing or other:
        names = ", ".join([*missing, *other][:3])
        wrong = f"'{spec.model}' lacks {len(missing) + len(other)} weights of a {type(model).__name__} ({names})"
        raise ModelError(f"{spec.where}.model", wrong, "They would be random", "Choose a model with these weights")
    if any(name.startswith("pooler.") for name in report["missing_keys"]):
        model.pooler = None  # it would be random
    return model.eval()


class Tower(nn.Module):
    """A model of transformers as a network from normalized pixels [B, 3, S, S] to one tensor."""

    def __init__(self, model: nn.Module, patch: int = 0, projected: bool = False) -> None:
        """Wrap a model.

        Args:
            model: of transformers.
            patch: side of a patch, pixels; 0: it has no patches.
            projected: pooled features are CLIP's, projected into the space of the texts.
        """
        super().__init__()
        self.model, self.patch, self.projected = model, patch, projected

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits [B, C], or the pooled features [B, D] of a model without classes."""
        if hasattr(self.model, "get_image_features"):
            return self.pooled(pixels)
        said = self.model(pixel_values=pixels)
        return said.logits if hasattr(said, "logits") else self._pooled(said)

    def pooled(self, pixels: Tensor) -> Tensor:
        """Return the pooled features [B, D], projected where the model projects them."""
        if hasattr(self.model, "get_image_features"):
            said = self.model.get_image_features(pixel_values=pixels)  # type: ignore[operator]
            return said if isinstance(said, Tensor) else said.pooler_output
        return self._pooled(self.model(pixel_values=pixels))

    def _pooled(self, said: Any) -> Tensor:
        for name in ("image_embeds", "pooler_output"):
            value = getattr(said, name, None)
            if value is not None:
                return value.flatten(1)
        last = said.last_hidden_state
        return last[:, 0] if last.ndim == 3 else last.mean((2, 3))

    def described(self, pixels: Tensor, names: tuple[str, ...]) -> Outputs:
        """Return logits [B, C] (width 0 without classes) with the features that are named."""
        inner: Any = self.model
        if type(inner).__name__.endswith("ForImageClassification"):
            caught: list[Any] = []  # what the classifier takes, and what the backbone returns
            head = getattr(inner, "classifier", None) or inner.head
            hooks = [
                head.register_forward_pre_hook(lambda _, given: caught.append(given[0])),
                inner.base_model.register_forward_hook(lambda _, given, said: caught.append(said.last_hidden_state)),
            ]
            logits_BC = inner(pixel_values=pixels).logits
            for hook in hooks:
                hook.remove()
            last, pooled_BD = caught[0], caught[1].flatten(1)
        else:
            said = getattr(inner, "vision_model", inner)(pixel_values=pixels)
            pooled_BD = self.pooled(pixels) if self.projected else self._pooled(said)
            logits_BC, last = pooled_BD.new_zeros(len(pooled_BD), 0), said.last_hidden_state
        features = {"pooled": pooled_BD} if "pooled" in names else {}
        if "tokens" in names:
            features["tokens"] = self._tokens(last, pixels)
        return Outputs(logits_BC, features)

    def _tokens(self, last: Any, pixels: Tensor) -> Tensor:
        """Return the tokens of the patches [B, N, D], without class and register tokens."""
        if last.ndim == 4:
            return last.flatten(2).transpose(1, 2)
        patches = (pixels.shape[-2] // self.patch) * (pixels.shape[-1] // self.patch) if self.patch else last.shape[1]
        return last[:, last.shape[1] - patches :]


class TowerTeacher(Classifier):
    """A model of transformers with its normalization and input size. See `kd.contracts.TeacherModel`."""

    network: Tower

    def __init__(self, network: Tower, features: Collection[str], **described: Any) -> None:
        """Wrap a tower; `described` are the arguments of a Classifier."""
        super().__init__(network, features=features, **described)

    def forward(self, image: Tensor) -> Outputs:
        """Answer for uint8 images [B, 3, H, W]."""
        if not self.features:
            return super().forward(image)
        return self.network.described(self.normalize(image), self.features)

    @property
    def num_features(self) -> int:
        """Width of the pooled features."""
        config: Any = self.network.model.config
        if self.network.projected:
            return int(config.projection_dim)
        return int(getattr(getattr(config, "vision_config", config), "hidden_size", 0) or config.hidden_sizes[-1])
