"""What happens to the pixels of one image. Every random choice is drawn from the generator that is passed in."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance

from kd.pixels import centre_crop


@dataclass(frozen=True, slots=True)
class Train:
    """Random resized crop, flip, colour jitter, and a timm auto-augment policy if one is named."""

    size: int
    """Side of the result, pixels."""
    crop: float
    """Smallest share of the area that the crop keeps; 1.0: the whole image."""
    flip: float
    jitter: float
    policy: str = ""

    def __call__(self, image: Image.Image, rng: random.Random) -> Image.Image:
        """Return an RGB image of `size` x `size`."""
        box = random_box(image.width, image.height, self.crop, rng)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
        if rng.random() < self.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.jitter:
            image = _jitter(image, self.jitter, rng)
        return _auto_augment(image, self.policy, rng) if self.policy else image


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Centre crop and resize; nothing random."""

    size: int
    crop: float
    """Share of the shorter side that the crop keeps."""

    def __call__(self, image: Image.Image, rng: random.Random) -> Image.Image:
        """Return an RGB image of `size` x `size`."""
        return centre_crop(image, self.size, self.crop)


def random_box(width: int, height: int, smallest: float, rng: random.Random) -> tuple[float, float, float, float]:
    """Draw a crop box (left, top, right, bottom) of a random area and of an aspect between 3:4 and 4:3.

    Where the aspect drawn does not fit into the image at that area, the nearest one that fits is taken, so that one
    draw is always enough (Inception's crop, arXiv:1409.4842, rejects and draws again).
    """
    if smallest >= 1.0:
        return 0.0, 0.0, float(width), float(height)
    area = width * height * rng.uniform(smallest, 1.0)
    aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    aspect = min(max(aspect, area / height**2), width**2 / area)
    crop_width, crop_height = math.sqrt(area * aspect), math.sqrt(area / aspect)
    left, top = rng.uniform(0, width - crop_width), rng.uniform(0, height - crop_height)
    left, top = max(0.0, left), max(0.0, top)
    return left, top, min(width, left + crop_width), min(height, top + crop_height)


def _jitter(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
    steps = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    rng.shuffle(steps)
    for step in steps:
        image = step(image).enhance(rng.uniform(1 - strength, 1 + strength))
    return image


_policies: dict[tuple[str, int], object] = {}


def _auto_augment(image: Image.Image, policy: str, rng: random.Random) -> Image.Image:
    """Apply a timm policy. timm draws from Python's and NumPy's global generators: lend it ours, give theirs back."""
    transform = _policies.get((policy, image.width))
    if transform is None:
        transform = _policies[policy, image.width] = build_policy(policy, image.width)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(rng.getrandbits(64))
    np.random.seed(rng.getrandbits(32))
    try:
        return transform(image)  # type: ignore[operator]
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def build_policy(policy: str, size: int) -> object:
    """Build a timm auto-augment policy.

    timm 1.0.31 may ask Pillow to posterize to 0 bits, which Pillow 13 refuses: at least one bit is kept.

    Raises:
        ValueError: timm does not know the policy.
    """
    from timm.data import auto_augment  # 0.5 s of imports that only a policy needs

    posterize = auto_augment.NAME_TO_OP["PosterizeIncreasing"]
    if not getattr(posterize, "keeps_a_bit", False):

        def at_least_one_bit(image: Image.Image, bits: int, **options: object) -> Image.Image:
            return posterize(image, max(1, int(bits)), **options)

        at_least_one_bit.keeps_a_bit = True  # type: ignore[attr-defined]
        for name in [name for name in auto_augment.NAME_TO_OP if name.startswith("Posterize")]:
            auto_augment.NAME_TO_OP[name] = at_least_one_bit
    grey = (124, 116, 104)
    try:
        options = {"translate_const": int(size * 0.45), "img_mean": grey}
        if policy.startswith("rand"):
            return auto_augment.rand_augment_transform(policy, options)
        if policy.startswith("augmix"):
            return auto_augment.augment_and_mix_transform(policy, options)
        return auto_augment.auto_augment_transform(policy, options)
    except (AssertionError, KeyError, ValueError) as error:
        raise ValueError(f"'{policy}' is not a policy that timm knows: {error}") from error
