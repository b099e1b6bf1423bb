"""Measure the effect of a transformers image processor, a model's preprocessing.

Besides mean and std, families have their own keys, such as `do_flip_channel_order`,
`rescale_offset` and `include_top`, with their own defaults. So the processor is run on
noise. If each output channel is an affine function of one image channel, a Classifier
computes the same; anything else is refused.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from kd.core.errors import ModelError, error_summary
from kd.models.classifier import Preprocessing
from kd.models.spec import Spec

SIZES = ("do_resize", "do_center_crop", "do_pad", "do_thumbnail", "do_align_long_axis")
"""Switches of resizing and cropping, which kd does alike for every model."""
KEYS = ("size", "crop_size", "crop_pct", "resample", "do_center_crop", "do_resize")
SIDE = 32  # side of the noise image, pixels
FILES = ("processor_config.json", "preprocessor_config.json")


@dataclass(frozen=True, slots=True)
class Preparation:
    """A processor's effect on pixels."""

    size: int  # side of its output, pixels; 0: any
    mean: tuple[float, ...]  # per channel, for pixels in 0..1
    std: tuple[float, ...]
    order: tuple[int, ...]  # the image channel at each position of the model's input
    preprocessing: Preprocessing | None = None


IMAGENET = Preparation(0, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), (0, 1, 2))
"""ImageNet's mean and deviation, as timm has them, for weights that start at random."""


def has_processor(model: str) -> bool:
    """Return whether a folder says how pixels are normalized."""
    return any((Path(model) / name).is_file() for name in FILES)


def read_processor(spec: Spec, hub: Any) -> Any:
    try:
        return hub.AutoImageProcessor.from_pretrained(
            spec.model, trust_remote_code=False
        )
    # transformers raises many types, all caused by the folder
    except Exception as error:
        reason = f"'{spec.model}' has no preprocessor_config.json"
        for name in FILES:
            if (Path(spec.model) / name).is_file():
                reason = f"'{name}' of '{spec.model}' cannot be used"
        wrong = (
            f"{reason} ({error_summary(error)}), so that nothing says how pixels are"
            " normalized"
        )
        remedy = (
            "Write it there:"
            " AutoImageProcessor.from_pretrained(...).save_pretrained(folder)"
        )
        raise ModelError(f"{spec.config_path}.model", wrong, "", remedy) from error


def measure_processor(spec: Spec, processor: Any) -> Preparation:
    with torch.device("cpu"):  # because a teacher may be built on the meta device
        shape = _prepared(spec, processor, _noise()).shape
        if shape[1] != shape[2]:
            wrong = (
                f"the processor of '{spec.model}' makes {shape[2]}x{shape[1]} pixels of"
                " a square image"
            )
            allowed = "Square images (size, do_pad in preprocessor_config.json)"
            raise ModelError(
                f"{spec.config_path}.model", wrong, allowed, "Choose another model"
            )
        keeps_size = shape[1] == SIDE and not getattr(processor, "do_resize", True)
        unresized = _without(processor, SIZES)
        lines = _fitted_lines(spec, unresized)
        if lines is None:
            raise _not_affine_error(spec, unresized)
    gain, offset, order = lines
    mean, std = _written_or_measured(processor, -offset / gain, 1 / gain)
    by_channel = np.argsort(order)  # per channel of the image
    return Preparation(
        0 if keeps_size else shape[1],
        tuple(mean[by_channel].tolist()),
        tuple(std[by_channel].tolist()),
        tuple(order.tolist()),
        Preprocessing(
            "transformers",
            lambda image: _prepared(spec, processor, image),
            _key_text(processor, KEYS),
        ),
    )


def _noise() -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    )


def _prepared(spec: Spec, processor: Any, image: Image.Image) -> torch.Tensor:
    """Return the processor's output for an image, float32 [3, H, W]."""
    config_path = f"{spec.config_path}.model"
    try:
        pixels = processor(images=image, return_tensors="pt").get("pixel_values")
    # transformers raises many types, all caused by the folder
    except Exception as error:
        wrong = f"the processor of '{spec.model}' fails ({error_summary(error)})"
        names = ("image_mean", "image_std", "rescale_factor", "size", "crop_size")
        allowed = f"Its keys are {_key_text(processor, names)}"
        raise ModelError(config_path, wrong, allowed) from error
    shape = list(getattr(pixels, "shape", ()))
    if not isinstance(pixels, torch.Tensor) or len(shape) != 4 or shape[:2] != [1, 3]:
        wrong = (
            f"the {type(processor).__name__} of '{spec.model}' makes input of the shape"
            f" {shape} of an image"
        )
        allowed = (
            "One image [1, 3, H, W]; not patches (patch_size, max_num_patches), tiles"
            " or colour clusters"
        )
        remedy = "Choose another model, such as one of a fixed size"
        raise ModelError(config_path, wrong, allowed, remedy)
    return pixels[0].float()


def _without(processor: Any, switches: tuple[str, ...]) -> Any:
    changed = copy.copy(processor)
    for name in switches:
        if hasattr(changed, name):
            setattr(changed, name, False)
    return changed


def _fitted_lines(
    spec: Spec, processor: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return gain, offset and source of each output channel, for pixels in 0..1.

    None: an output channel is not a straight line of one image channel.
    """
    image = _noise()
    output = _prepared(spec, processor, image)
    if output.shape[1:] != (SIDE, SIDE) or not output.isfinite().all():
        return None
    pixels = np.asarray(image, np.float64).reshape(-1, 3) / 255
    inputs = np.column_stack([pixels, np.ones(len(pixels))])
    outputs = output.double().numpy().reshape(3, -1).T
    solution = np.linalg.lstsq(inputs, outputs)[0]
    gains = solution[:3].T
    offset = solution[3]
    order = np.abs(gains).argmax(1)
    gain = gains[np.arange(3), order]
    error = np.abs(inputs[:, order] * gain + offset - outputs).max(0)
    is_straight = bool((error < 1e-4 * outputs.std(0)).all())
    return (gain, offset, order) if is_straight and len({*order}) == 3 else None


def _written_or_measured(
    processor: Any, mean: np.ndarray, std: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the processor's own numbers if they equal the measured ones, rounded."""
    measured = mean.round(6), std.round(6)
    factor = 255.0
    if getattr(processor, "do_rescale", False):
        factor = 255 * processor.rescale_factor
    keys = (0.0, 1.0)
    if getattr(processor, "do_normalize", False):
        image_mean = getattr(processor, "image_mean", 0.0)
        keys = image_mean, getattr(processor, "image_std", 1.0)
    try:
        written_mean, written_std = (
            np.broadcast_to(np.array(key, np.float64) / factor, 3) for key in keys
        )
    except (TypeError, ValueError):
        return measured
    is_close = np.allclose(written_mean, mean, 1e-5, 1e-6)
    if is_close and np.allclose(written_std, std, 1e-5, 1e-6):
        return written_mean, written_std
    return measured


def _not_affine_error(spec: Spec, processor: Any) -> ModelError:
    """Return the error for a processor that is not affine, with the guilty keys."""
    switches = [
        name
        for name in vars(processor)
        if name.startswith("do_") and getattr(processor, name) is True
    ]
    guilty = [
        name
        for name in switches
        if _fitted_lines(spec, _without(processor, (name,))) is not None
    ] or switches
    wrong = (
        f"preprocessor_config.json of '{spec.model}' changes pixels in another way than"
        " by mean and deviation"
    )
    if "do_normalize" in guilty:
        guilty = [
            f"image_std {getattr(processor, 'image_std', None)}",
            f"image_mean {getattr(processor, 'image_mean', None)}",
        ]
    allowed = "A straight line of each channel, with deviations above 0"
    return ModelError(
        f"{spec.config_path}.model",
        f"{wrong}: {', '.join(guilty)}",
        allowed,
        "Correct these keys",
    )


def _key_text(processor: Any, names: Sequence[str]) -> str:
    values = processor.to_dict()
    return ", ".join(
        f"{name} {values[name]}" for name in names if values.get(name) is not None
    )
