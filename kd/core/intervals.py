"""95 % intervals of scores: the error of a score that was measured on a limited number of images.

They do not hold the luck of the seed, images that are near copies of each other, and other cameras.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Z = 1.959964  # 97.5 % of a normal distribution lie below
RESAMPLES = 200
"""Enough for a standard error (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 6.4)."""
FEW_IMAGES = 18.0
"""The bootstrap's standard error of a mean average precision is too small where images are few: two equal models were
called better or worse in 13 % of the cases at 60 images and in 7 % at 200, where 5 % are promised. Standard errors
1 + 18 / images times as large make 5 % of both."""


def wilson(share: float, images: int) -> tuple[float, float]:
    """Return the interval of a share of independent images, 0 to 1; all of 0 to 1 without any.

    E. B. Wilson, J. Am. Stat. Assoc. 22 (1927); recommended for any number of images by Brown, Cai and DasGupta,
    Statistical Science 16 (2001).
    """
    if not images:
        return 0.0, 1.0
    centre = share + Z * Z / (2 * images)
    half = Z * math.sqrt(share * (1 - share) / images + (Z / (2 * images)) ** 2)
    scale = 1 + Z * Z / images
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def paired(gained: int, lost: int, images: int) -> tuple[float, float]:
    """Return the interval of the difference of two shares of the same images; -1 to 1 without any.

    `gained` and `lost` images are right by the first and by the second model alone. The adjusted Wald interval of
    Bonett and Price, J. Educ. Behav. Stat. 37 (2012), one of three that Fagerland, Lydersen and Laake recommend
    (Statistics in Medicine 33, 2014). Like McNemar's test it looks at the discordant images alone.
    """
    if not images:
        return -1.0, 1.0
    up, down = (gained + 1) / (images + 2), (lost + 1) / (images + 2)
    half = Z * math.sqrt((up + down - (up - down) ** 2) / (images + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)


def resampled(score: Callable[[np.ndarray], Any], images: int) -> np.ndarray:
    """Return a score on `RESAMPLES` bootstrap samples, float64; `score` gets the positions of a sample, int64 [images].

    Several scores at once are rows: [`RESAMPLES`, scores]. The samples depend on the number of images alone, so that
    the difference of two models' values, sample by sample, is the paired bootstrap of their difference.
    """
    draw = np.random.default_rng(images)
    return np.array([score(draw.integers(0, images, images)) for _ in range(RESAMPLES)])


def around(value: float, replicates: Sequence[float] | np.ndarray, images: int = 0) -> tuple[float, float]:
    """Return value - bias +- 1.96 standard errors, both of the bootstrap values; wider for few `images`.

    Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 5.2. A mean average precision of few
    images is too high by itself, that of a resample by as much again: percentiles would lie on the wrong side.
    """
    drawn = np.asarray(replicates, np.float64)
    wider = 1 + FEW_IMAGES / images if images else 1.0
    centre, half = 2 * value - float(drawn.mean()), wider * Z * float(drawn.std(ddof=1))
    return centre - half, centre + half


def verdict(low: float, high: float) -> str:
    """Return the verdict of a difference's interval on the first model: better, worse, or that it does not say."""
    return "better" if low > 0 else "worse" if high < 0 else "no difference shown"


@dataclass(frozen=True, slots=True)
class Samples:
    """What one score of a model was computed from: enough for its interval, and for that of a difference."""

    value: float
    right: np.ndarray | None = None  # bool [N], where the score is the share of N images that are right
    replicates: np.ndarray | None = None  # of any other score: its values on bootstrap samples, see `resampled`
    images: int = 0  # that gave `replicates`; 0: many
    ends: tuple[float, float] | None = None  # of its interval, where they alone were recorded

    def interval(self) -> tuple[float, float]:
        if self.ends is not None:
            return self.ends
        if self.right is not None:
            return wilson(self.value, len(self.right))
        assert self.replicates is not None
        return around(self.value, self.replicates, self.images)

    def minus(self, other: Samples) -> tuple[float, float, float]:
        """Return the difference from another model's score of the same images, with the ends of its interval."""
        difference = self.value - other.value
        if self.right is not None and other.right is not None:
            gained, lost = int((self.right & ~other.right).sum()), int((other.right & ~self.right).sum())
            return difference, *paired(gained, lost, len(self.right))
        assert self.replicates is not None
        assert other.replicates is not None
        return difference, *around(difference, self.replicates - other.replicates, self.images)

    def record(self) -> dict[str, Any]:
        """Return it as JSON values: a hexadecimal digit for four images, or the bootstrap values."""
        if self.right is not None:
            return {"value": self.value, "images": len(self.right), "right": np.packbits(self.right).tobytes().hex()}
        assert self.replicates is not None
        drawn = [round(float(one), 6) for one in self.replicates]
        return {"value": self.value, "images": self.images, "replicates": drawn}

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> Samples:
        if "right" in recorded:
            bits = np.unpackbits(np.frombuffer(bytes.fromhex(recorded["right"]), np.uint8), count=recorded["images"])
            return cls(recorded["value"], right=bits.astype(bool))
        drawn = np.array(recorded["replicates"], np.float64)
        return cls(recorded["value"], replicates=drawn, images=recorded["images"])
