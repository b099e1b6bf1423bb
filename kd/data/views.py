"""Views of a source are transformed and mixed images.

An augmented image is a pure function of (seed, view, id).

Every random choice uses the generator that is passed in.
"""

import functools
import math
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from kd.core.contracts import Source
from kd.core.errors import CorruptImage
from kd.core.seeds import seed_from
from kd.core.types import Loading, Sample
from kd.data.subset import decode_image
from kd.files.pixels import centre_crop, could_reduce, least_of_centre, least_of_random

MEAN = np.array([123.675, 116.28, 103.53])  # of ImageNet's pixels, 0 to 255
STD = np.array([58.395, 57.12, 57.375])  # of ImageNet's pixels, 0 to 255
# logarithms of a random crop's smallest and largest aspect ratio
ASPECTS = (math.log(3 / 4), math.log(4 / 3))
ONES = np.ones(784, np.float32)
GREY = 0.299, 0.587, 0.114  # weights of red, green and blue (ITU-R 601), as in Pillow
# raised with every change of `TrainTransform`'s pixels; caches of another format are
# rebuilt
FORMAT = 2


@dataclass(frozen=True, slots=True)
class MixupCutmix:
    """Mix images by mixup (arXiv:1710.09412) or CutMix (arXiv:1905.04899).

    The partner is a function of (seed, view, id).
    """

    # The partner is drawn from the whole dataset, not from the batch, so a mixed image
    # does not depend on its batch: a cached teacher sees the same pixels. Cost: a
    # second decode per mixed image.

    mixup: float  # alpha of the Beta distribution; 0: no mixup
    cutmix: float
    probability: float


class Views:
    """Views decode, transform and mix a source's images.

    See `kd.core.contracts.Dataset`.
    """

    # the same views (crops, flips, colours) at lower resolution
    small: "Views | None" = None

    def __init__(
        self,
        source: Source,
        transform: Callable[[Image.Image, random.Random], Image.Image],
        size: int,
        seed: int,
        mixing: MixupCutmix | None = None,
        on_corrupt: str = "error",
        drawn: int = 0,
    ) -> None:
        # `drawn`: image side for CutMix's boxes, so that a small view has the same
        # boxes; 0: `size`
        self.source = source
        self.transform = transform
        self.size = size
        self.seed = seed
        self.mixing = mixing
        self.on_corrupt = on_corrupt
        self.drawn = drawn
        self.classes = source.classes
        self.spent = Loading()  # in this process: `decoding` and its parts, `resizing`

    def __len__(self) -> int:
        return len(self.source)

    def load(self, id: int, view: int) -> Sample:
        rng = random.Random(seed_from(self.seed, "view", view, id))
        label = self.source.label(id)
        image = self._pixels(id, rng)
        if image is None:
            grey = torch.full((3, self.size, self.size), 127, dtype=torch.uint8)
            return Sample(grey, label, label, 1.0, readable=False)
        pixels, crc = image
        if self.mixing is None or rng.random() >= self.mixing.probability:
            return Sample(pixels, label, label, 1.0, crc=crc)
        partner = rng.randrange(len(self.source))
        # The partner's transform is seeded by this pair, not by the partner's own view.
        image = self._pixels(partner, random.Random(rng.getrandbits(64)))
        if image is None:
            return Sample(pixels, label, label, 1.0, crc=crc)
        partner_pixels, partner_crc = image
        mixed, lam = mix(pixels, partner_pixels, self.mixing, rng, self.drawn)
        crc_of_both = 0
        if crc and partner_crc:
            crc_of_both = zlib.crc32(partner_crc.to_bytes(4, "little"), crc)
        return Sample(mixed, label, self.source.label(partner), lam, crc=crc_of_both)

    def _pixels(self, id: int, rng: random.Random) -> tuple[Tensor, int] | None:
        begin = time.perf_counter()
        least = getattr(self.transform, "least", None)
        try:
            image, crc = decode_image(self.source, id, least)[:2]
        except CorruptImage:
            self.spent = self.spent.plus(Loading(decoding=time.perf_counter() - begin))
            if self.on_corrupt == "skip":
                return None
            raise
        end = time.perf_counter()
        decoding = end - begin
        reducible = least is not None and could_reduce(image, least)
        if isinstance(self.transform, TrainTransform):
            image = self.transform.cut(image, rng)
            resizing = time.perf_counter() - end
            image = self.transform.change(image, rng)
        else:
            image = self.transform(image, rng)
            resizing = 0.0
        self.spent = self.spent.plus(
            Loading(0.0, 0.0, decoding, resizing, reducible * decoding)
        )
        # half the time of a transposed copy
        planes = bytearray().join(image.tobytes("raw", band) for band in "RGB")
        pixels = torch.frombuffer(planes, dtype=torch.uint8)
        return pixels.view(3, image.height, image.width), crc


def mix(
    pixels: Tensor,
    partner: Tensor,
    mixing: MixupCutmix,
    rng: random.Random,
    drawn: int = 0,
) -> tuple[Tensor, float]:
    """Mix two images, uint8 [3, H, W], and return the result and lam.

    lam is the share of the first image.

    `drawn`: image side for the box; 0: the side of these images.
    """
    # If both alphas are above 0, mixup and CutMix are equally likely. After CutMix lam
    # is the exact share of pixels outside the box, not the drawn value.
    cut = mixing.cutmix > 0 and (mixing.mixup <= 0 or rng.random() < 0.5)
    alpha = mixing.cutmix if cut else mixing.mixup
    lam = rng.betavariate(alpha, alpha)
    if not cut:
        mixed = pixels.float().mul_(lam).add_(partner.float(), alpha=1 - lam)
        return mixed.round_().to(torch.uint8), lam
    height, width = (drawn, drawn) if drawn else pixels.shape[1:]
    side = math.sqrt(1 - lam)
    row = rng.randrange(height)
    column = rng.randrange(width)
    top, bottom = (
        round(max(0.0, min(height, row + sign * height * side / 2))) for sign in (-1, 1)
    )
    left, right = (
        round(max(0.0, min(width, column + sign * width * side / 2)))
        for sign in (-1, 1)
    )
    share = pixels.shape[1] / height
    box = (
        slice(None),
        slice(round(share * top), round(share * bottom)),
        slice(round(share * left), round(share * right)),
    )
    mixed = pixels.clone()
    mixed[box] = partner[box]
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)


@dataclass(frozen=True, slots=True)
class TrainTransform:
    """Crop at random, flip, jitter colours, apply a policy of timm, and erase."""

    size: int  # side of the result, pixels
    crop: float  # smallest share of the area that the crop keeps; 1.0: the whole image
    flip: float
    jitter: float
    policy: str = ""
    erase: float = 0.0  # probability that a rectangle becomes noise
    drawn: int = 0  # image side for that rectangle; 0: `size`

    def __call__(self, image: Image.Image, rng: random.Random) -> Image.Image:
        return self.change(self.cut(image, rng), rng)

    def cut(self, image: Image.Image, rng: random.Random) -> Image.Image:
        return cut(image, random_box(*image.size, self.crop, rng), self.size)

    def change(self, image: Image.Image, rng: random.Random) -> Image.Image:
        if rng.random() < self.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.jitter:
            image = jitter(image, self.jitter, rng)
        if self.policy:
            image = _auto_augment(image, self.policy, rng)
        if self.erase and rng.random() < self.erase:
            image = erase(image, rng, self.drawn)
        return image

    def least(self, width: int, height: int) -> float:  # see `kd.files.pixels.reduce`
        return least_of_random(width, height, self.size, self.crop)


@dataclass(frozen=True, slots=True)
class EvalTransform:
    """Crop the centre and resize, without randomness.

    A store keeps the result for validation images.
    """

    size: int
    crop: float  # share of the shorter side that the crop keeps

    @property
    def max_pixels(self) -> int:  # pixels of the result
        return self.size**2

    def __call__(
        self, image: Image.Image, rng: random.Random | None = None
    ) -> Image.Image:
        return centre_crop(image, self.size, self.crop)

    def least(self, width: int, height: int) -> float:
        return least_of_centre(width, height, self.size, self.crop)


def random_box(
    width: int, height: int, smallest: float, rng: random.Random
) -> tuple[float, float, float, float]:
    """Draw a crop box (left, top, right, bottom) with random area.

    Its aspect ratio is between 3:4 and 4:3.
    """
    # If the drawn aspect ratio does not fit into the image at that area, the nearest
    # fitting one is used, so one draw is enough (Inception's crop, arXiv:1409.4842,
    # rejects and draws again).
    if smallest >= 1.0:
        return 0.0, 0.0, float(width), float(height)
    area = width * height * rng.uniform(smallest, 1.0)
    aspect = math.exp(rng.uniform(*ASPECTS))
    aspect = min(max(aspect, area / height**2), width**2 / area)
    crop_width = math.sqrt(area * aspect)
    crop_height = math.sqrt(area / aspect)
    x = max(0.0, rng.uniform(0, width - crop_width))
    y = max(0.0, rng.uniform(0, height - crop_height))
    return x, y, min(width, x + crop_width), min(height, y + crop_height)


def cut(
    image: Image.Image, box: tuple[float, float, float, float], size: int
) -> Image.Image:
    """Crop a box's whole pixels from an RGB image and resize them (bilinear).

    The result is a square of side `size`.
    """
    # Torch's channels-last kernel for uint8 takes a third of Pillow's time with AVX2,
    # and gives the same bits without. Pillow stores four bytes per pixel, so four
    # channels are passed. A large box is averaged first, like Pillow's
    # `reducing_gap=2`.
    x, y = map(math.floor, box[:2])
    right, bottom = map(math.ceil, box[2:])
    pixel_box = x, y, right, bottom
    factor = min(right - x, bottom - y) // (2 * size)
    image = image.reduce(factor, pixel_box) if factor > 1 else image.crop(pixel_box)
    pixels = torch.frombuffer(
        bytearray(image.tobytes("raw", "RGBX")), dtype=torch.uint8
    )
    pixels = pixels.view(1, image.height, image.width, 4).permute(0, 3, 1, 2)
    small = functional.interpolate(
        pixels, (size, size), mode="bilinear", antialias=True
    )
    content = np.ascontiguousarray(small[0].permute(1, 2, 0))
    return Image.frombytes("RGB", (size, size), content, "raw", "RGBX")


def jitter(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
    """Change brightness, contrast and saturation of an RGB image by up to `strength`.

    The order is random.
    """
    # Each step is an affine map of colour and grey, equal for all three channels. So
    # all steps are one matrix, and values are rounded and clipped once. Contrast pivots
    # on the mean grey of a grid of 28 x 28 pixels.
    grid = image.resize((28, 28), Image.Resampling.NEAREST)
    pixels = np.frombuffer(grid.tobytes(), np.uint8).reshape(784, 3)
    # exact, in a third of grid.mean's time
    mean = ((ONES @ pixels.astype(np.float32)).astype(float) / 784).dot(GREY)
    # a pixel becomes a times its colour plus b times its grey plus c
    a = 1.0
    b = 0.0
    c = 0.0
    steps = ["brightness", "contrast", "saturation"]
    rng.shuffle(steps)
    for step in steps:
        factor = rng.uniform(1 - strength, 1 + strength)
        if step == "saturation":
            b += (1 - factor) * a
            a *= factor
            continue
        pivot = 0.0
        if step == "contrast":
            pivot = (1 - factor) * ((a + b) * mean + c)
        a *= factor
        b *= factor
        c = factor * c + pivot
    red, green, blue = (b * share for share in GREY)
    return image.convert(
        "RGB",
        (a + red, green, blue, c, red, a + green, blue, c, red, green, a + blue, c),
    )


def erase(image: Image.Image, rng: random.Random, drawn: int = 0) -> Image.Image:
    """Return a square with a rectangle of normal noise around ImageNet's mean.

    This is random erasing, arXiv:1708.04896.
    """
    # As timm's mode `pixel`: area 2 to 33 %, aspect ratio 0.3 to 1 / 0.3, up to ten
    # draws until it fits.
    image = image.copy()
    side = drawn or image.width
    share = image.width / side
    for _ in range(10):
        area = rng.uniform(0.02, 1 / 3) * side * side
        aspect = math.exp(rng.uniform(math.log(0.3), -math.log(0.3)))
        height = round(math.sqrt(area * aspect))
        width = round(math.sqrt(area / aspect))
        if height < side and width < side:
            y = rng.randint(0, side - height)
            x = rng.randint(0, side - width)
            height, width, y, x = (
                round(share * length) for length in (height, width, y, x)
            )
            draw = np.random.default_rng(rng.getrandbits(64))
            noise = draw.standard_normal((max(1, height), max(1, width), 3))
            pixels = np.rint(MEAN + STD * noise).clip(0, 255).astype(np.uint8)
            image.paste(Image.fromarray(pixels), (x, y))
            break
    return image


def _auto_augment(image: Image.Image, policy: str, rng: random.Random) -> Image.Image:
    """Apply a timm policy.

    timm draws from Python's and NumPy's global generators: they are seeded, then
    restored.
    """
    transform = build_policy(policy, image.width)
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    random.seed(rng.getrandbits(64))
    np.random.seed(rng.getrandbits(32))
    try:
        return transform(image)  # type: ignore[operator]
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@functools.lru_cache
def build_policy(policy: str, size: int) -> object:
    """Build a timm auto-augment policy; ValueError: timm does not know it."""
    # timm 1.0.31 may posterize to 0 bits, which Pillow 13 refuses: at least one bit is
    # kept.
    from timm.data import auto_augment  # 0.5 s of imports, needed only for a policy

    posterize = auto_augment.NAME_TO_OP["PosterizeIncreasing"]
    if not getattr(posterize, "keeps_a_bit", False):

        def at_least_one_bit(
            image: Image.Image, bits: int, **options: object
        ) -> Image.Image:
            return posterize(image, max(1, int(bits)), **options)

        at_least_one_bit.keeps_a_bit = True  # type: ignore[attr-defined]
        for name in auto_augment.NAME_TO_OP:
            if name.startswith("Posterize"):
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
        raise ValueError(
            f"'{policy}' is not a policy that timm knows: {error}"
        ) from error
