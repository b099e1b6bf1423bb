"""Measure the effect of a transformers image processor on pixels, a model's native
preprocessing.

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
"""Keys that switch off resizing and cropping: kd gives every model the same bicubically
resized square.
"""
KEYS = ("size", "crop_size", "crop_pct", "resample", "do_center_crop", "do_resize")
SIDE = 32  # side of the noise image, pixels


@dataclass(frozen=True, slots=True)
class Preparation:
    """A processor's effect on pixels."""

    size: int  # side of its output, pixels; 0: any
    mean: tuple[float, ...]  # per channel, for pixels in 0..1
    std: tuple[float, ...]
    order: tuple[int, ...]  # the image channel at each position of the model's input
    preprocessing: Preprocessing


def read_processor(spec: Spec, hub: Any) -> Any:
    try:
        return hub.AutoImageProcessor.from_pretrained(
            spec.model, trust_remote_code=False
        )
    except (
        Exception
    ) as error:  # transformers raises many types, all caused by the folder
        files = [
            Path(spec.model) / name
            for name in ("preprocessor_config.json", "processor_config.json")
        ]
        there = [
            f"'{file.name}' of '{spec.model}' cannot be used"
            for file in files
            if file.is_file()
        ]
        wrong = there[0] if there else f"'{spec.model}' has no preprocessor_config.json"
        wrong = f"{wrong} ({error_summary(error)}), so that nothing says how pixels are normalized"
        remedy = (
            "Write it there:"
            " AutoImageProcessor.from_pretrained(...).save_pretrained(folder)"
        )
        raise ModelError(f"{spec.config_path}.model", wrong, "", remedy) from error


def measure(spec: Spec, processor: Any) -> Preparation:
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
        size = (
            0
            if shape[1] == SIDE and not getattr(processor, "do_resize", True)
            else shape[1]
        )
        flat = _without(processor, SIZES)
        line = _line(spec, flat)
        if line is None:
            raise _crooked(spec, flat)
    gain, offset, order = line
    mean, std = _written(processor, -offset / gain, 1 / gain)
    back = np.argsort(order)  # per channel of the image
    own = Preprocessing(
        "transformers",
        lambda image: _prepared(spec, processor, image),
        _keys(processor, KEYS),
    )
    return Preparation(
        size,
        tuple(mean[back].tolist()),
        tuple(std[back].tolist()),
        tuple(order.tolist()),
        own,
    )


def _noise() -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    )


def _prepared(spec: Spec, processor: Any, image: Image.Image) -> torch.Tensor:
    """Return the processor's output for an image, float32 [3, H, W]."""
    try:
        found = processor(images=image, return_tensors="pt").get("pixel_values")
    except (
        Exception
    ) as error:  # transformers raises many types, all caused by the folder
        wrong = f"the processor of '{spec.model}' fails ({error_summary(error)})"
        numbers = _keys(
            processor,
            ("image_mean", "image_std", "rescale_factor", "size", "crop_size"),
        )
        raise ModelError(
            f"{spec.config_path}.model", wrong, f"Its keys are {numbers}"
        ) from error
    if (
        not isinstance(found, torch.Tensor)
        or found.ndim != 4
        or found.shape[:2] != (1, 3)
    ):
        shape = list(getattr(found, "shape", ()))
        wrong = (
            f"the {type(processor).__name__} of '{spec.model}' makes input of the shape"
            f" {shape} of an image"
        )
        allowed = (
            "One image [1, 3, H, W]; not patches (patch_size, max_num_patches), tiles"
            " or colour clusters"
        )
        raise ModelError(
            f"{spec.config_path}.model",
            wrong,
            allowed,
            "Choose another model, such as one of a fixed size",
        )
    return found[0].float()


def _without(processor: Any, switches: tuple[str, ...]) -> Any:
    changed = copy.copy(processor)
    for name in switches:
        if hasattr(changed, name):
            setattr(changed, name, False)
    return changed


def _line(spec: Spec, flat: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return gain, offset and source channel of each output channel, for pixels in
    0..1.
    """
    image = _noise()
    found = _prepared(spec, flat, image)
    if found.shape[1:] != (SIDE, SIDE) or not found.isfinite().all():
        return None
    pixels = np.asarray(image, np.float64).reshape(-1, 3) / 255
    known = np.column_stack([pixels, np.ones(len(pixels))])
    answers = found.double().numpy().reshape(3, -1).T
    solution = np.linalg.lstsq(known, answers)[0]
    gains, offset = solution[:3].T, solution[3]
    order = np.abs(gains).argmax(1)
    gain = gains[np.arange(3), order]
    straight = known[:, order] * gain + offset
    error, spread = np.abs(straight - answers).max(0), answers.std(0)
    return (
        (gain, offset, order)
        if (error < 1e-4 * spread).all() and len({*order.tolist()}) == 3
        else None
    )


def _written(
    processor: Any, mean: np.ndarray, std: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the processor's own numbers if they equal the measured ones up to
    rounding.
    """
    factor = 255 * (
        processor.rescale_factor if getattr(processor, "do_rescale", False) else 1.0
    )
    keys = getattr(processor, "image_mean", 0.0), getattr(processor, "image_std", 1.0)
    given = keys if getattr(processor, "do_normalize", False) else (0.0, 1.0)
    try:
        exact = [
            np.broadcast_to(np.array(one, np.float64) / factor, 3) for one in given
        ]
    except (TypeError, ValueError):
        exact = [mean.round(6), std.round(6)]
    close = all(
        np.allclose(one, found, 1e-5, 1e-6)
        for one, found in zip(exact, (mean, std), strict=True)
    )
    return (exact[0], exact[1]) if close else (mean.round(6), std.round(6))


def _crooked(spec: Spec, flat: Any) -> ModelError:
    """Return the error for a processor that is not affine, naming the
    responsible keys.
    """
    on = [
        name
        for name in vars(flat)
        if name.startswith("do_") and getattr(flat, name) is True
    ]
    guilty = [
        name for name in on if _line(spec, _without(flat, (name,))) is not None
    ] or on
    wrong = (
        f"preprocessor_config.json of '{spec.model}' changes pixels in another way than"
        " by mean and deviation"
    )
    if "do_normalize" in guilty:
        guilty = [
            f"image_std {getattr(flat, 'image_std', None)}",
            f"image_mean {getattr(flat, 'image_mean', None)}",
        ]
    allowed = "A straight line of each channel, with deviations above 0"
    return ModelError(
        f"{spec.config_path}.model",
        f"{wrong}: {', '.join(guilty)}",
        allowed,
        "Correct these keys",
    )


def _keys(processor: Any, names: Sequence[str]) -> str:
    found = processor.to_dict()
    return ", ".join(
        f"{name} {found[name]}" for name in names if found.get(name) is not None
    )
