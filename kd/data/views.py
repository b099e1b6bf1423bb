"""One image, one view, one seed: the pixels that training sees are a pure function of (seed, view, id)."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kd.contracts import Source
from kd.errors import CorruptImage
from kd.seeds import seed_from
from kd.types import Sample


@dataclass(frozen=True, slots=True)
class Mixing:
    """Mixup (arXiv:1710.09412) and CutMix (arXiv:1905.04899) with a partner that is a function of (seed, view, id).

    The partner is drawn from the whole dataset, not from the batch, so that a mixed image does not depend on its
    neighbours: a cached teacher sees the very same pixels. Cost: a second decode for each mixed image.
    """

    mixup: float
    """Alpha of the Beta distribution; 0: no mixup."""
    cutmix: float
    probability: float

    @property
    def on(self) -> bool:
        """Whether any image is ever mixed."""
        return (self.mixup > 0 or self.cutmix > 0) and self.probability > 0


class Views:
    """The views of a source: decode, transform, mix. See `kd.contracts.Dataset`."""

    def __init__(
        self,
        source: Source,
        transform: Callable[[Image.Image, random.Random], Image.Image],
        size: int,
        seed: int,
        mixing: Mixing | None = None,
        on_corrupt: str = "error",
    ) -> None:
        self.source, self.transform, self.size, self.seed = source, transform, size, seed
        self.mixing = mixing if mixing is not None and mixing.on else None
        self.on_corrupt = on_corrupt
        self.classes = source.classes

    def __len__(self) -> int:
        return len(self.source)

    def load(self, id: int, view: int) -> Sample:
        """Return one view of one image.

        Raises:
            CorruptImage: the image cannot be decoded and `data.on_corrupt` is `error`.
            DataError: it cannot be read.
        """
        rng = random.Random(seed_from(self.seed, "view", view, id))
        label = self.source.label(id)
        found = self._pixels(id, rng)
        if found is None:
            grey = torch.full((3, self.size, self.size), 127, dtype=torch.uint8)
            return Sample(grey, label, label, 1.0, readable=False)
        pixels, crc = found
        if self.mixing is None or rng.random() >= self.mixing.probability:
            return Sample(pixels, label, label, 1.0, crc=crc)
        partner = rng.randrange(len(self.source))
        # The partner is seen through its own transform, with a seed of this pair, not of the partner's own view.
        other = self._pixels(partner, random.Random(rng.getrandbits(64)))
        if other is None:
            return Sample(pixels, label, label, 1.0, crc=crc)
        mixed, lam = mix(pixels, other[0], self.mixing, rng)
        both = zlib.crc32(other[1].to_bytes(4, "little"), crc) if crc and other[1] else 0
        return Sample(mixed, label, self.source.label(partner), lam, crc=both)

    def _pixels(self, id: int, rng: random.Random) -> tuple[Tensor, int] | None:
        try:
            image, crc = self.source.decode(id)
        except CorruptImage:
            if self.on_corrupt == "skip":
                return None
            raise
        array = np.asarray(self.transform(image, rng))
        return torch.from_numpy(array.transpose(2, 0, 1).copy()), crc


def mix(pixels: Tensor, other: Tensor, mixing: Mixing, rng: random.Random) -> tuple[Tensor, float]:
    """Mix two images.

    Args:
        pixels: uint8 [3, H, W], the image whose label gets the share lam.
        other: uint8 [3, H, W].
        mixing: the alphas; with both on, each image gets one of the two with equal chance.
        rng: where lam, the box and the choice are drawn from.

    Returns:
        The mixed uint8 [3, H, W] and lam, corrected to the pixels really kept where a box was pasted.
    """
    cut = mixing.cutmix > 0 and (mixing.mixup <= 0 or rng.random() < 0.5)
    alpha = mixing.cutmix if cut else mixing.mixup
    lam = rng.betavariate(alpha, alpha)
    if not cut:
        mixed = pixels.float().mul_(lam).add_(other.float(), alpha=1 - lam)
        return mixed.round_().to(torch.uint8), lam
    height, width = pixels.shape[1:]
    side = math.sqrt(1 - lam)
    row, column = rng.randrange(height), rng.randrange(width)
    top, bottom = (round(max(0.0, min(height, row + sign * height * side / 2))) for sign in (-1, 1))
    left, right = (round(max(0.0, min(width, column + sign * width * side / 2))) for sign in (-1, 1))
    mixed = pixels.clone()
    mixed[:, top:bottom, left:right] = other[:, top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)
