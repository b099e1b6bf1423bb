"""A score has a 95 % interval, because its number of images is limited.

They do not cover the variation over seeds, near-duplicate images, and other cameras.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Z = 1.959964  # the 97.5 % quantile of the normal distribution
RESAMPLES = 200
"""Bootstrap samples: enough for a standard error (Efron and Tibshirani, An Introduction
to the Bootstrap, 1993, 6.4).
"""
FEW_IMAGES = 18.0
"""The bootstrap's standard error of a mean average precision is too small for few
images: two equal models were called better or worse in 13 % of the cases at 60 images
and in 7 % at 200, instead of 5 %. Multiplying it by 1 + 18 / images gives 5 % for both.
"""


def wilson_interval(share: float, images: int) -> tuple[float, float]:
    """Return the interval of a share of independent images, 0 to 1.

    (0, 1) stands for no images.

    E. B. Wilson, J. Am. Stat. Assoc. 22 (1927); recommended for any number of images by
    Brown, Cai and DasGupta, Statistical Science 16 (2001).
    """
    if not images:
        return 0.0, 1.0
    centre = share + Z * Z / (2 * images)
    half = Z * math.sqrt(share * (1 - share) / images + (Z / (2 * images)) ** 2)
    scale = 1 + Z * Z / images
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def paired_interval(gained: int, lost: int, images: int) -> tuple[float, float]:
    """Return the interval of the difference of two shares of the same images.

    The adjusted Wald interval of Bonett and Price, J. Educ. Behav. Stat. 37 (2012), one
    of three that Fagerland, Lydersen and Laake recommend (Statistics in Medicine 33,
    2014). Like McNemar's test it uses only the discordant images.

    Args:
        gained: images that only the first model predicts correctly.
        lost: images that only the second predicts correctly.
        images: number of all images; 0 gives (-1, 1).
    """
    if not images:
        return -1.0, 1.0
    up = (gained + 1) / (images + 2)
    down = (lost + 1) / (images + 2)
    half = Z * math.sqrt((up + down - (up - down) ** 2) / (images + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)


def bootstrap_scores(score: Callable[[np.ndarray], Any], images: int) -> np.ndarray:
    """Return a score on `RESAMPLES` bootstrap samples, float64.

    `score` gets the positions of a sample, int64 [images].

    Several scores at once are rows: [`RESAMPLES`, scores]. The samples depend only on
    the number of images. So the difference of two models' values, sample by sample, is
    the paired bootstrap of their difference.
    """
    draw = np.random.default_rng(images)
    return np.array([score(draw.integers(0, images, images)) for _ in range(RESAMPLES)])


def bootstrap_interval(
    value: float, replicates: Sequence[float] | np.ndarray, images: int = 0
) -> tuple[float, float]:
    """Return value - bias +- 1.96 standard errors, both from the bootstrap.

    The interval is wider for few `images`.

    Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 5.2. A
    mean average precision of few images is biased upward, and a resample's is biased
    twice: percentiles would lie on the wrong side.
    """
    drawn = np.asarray(replicates, np.float64)
    widening = 1 + FEW_IMAGES / images if images else 1.0
    centre = 2 * value - float(drawn.mean())
    half = widening * Z * float(drawn.std(ddof=1))
    return centre - half, centre + half


def clip_to_share(low: float, high: float) -> tuple[float, float]:
    """Return the ends of a share's interval within 0 to 1."""
    return min(1.0, max(0.0, low)), min(1.0, max(0.0, high))


def interval_verdict(low: float, high: float) -> str:
    """Return what a difference's interval says of the first model."""
    if low > 0:
        return "better"
    return "worse" if high < 0 else "no difference shown"


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples behind one score are enough for its interval and a difference's."""

    value: float
    # bool [N], if the score is the share of N images that are right
    right: np.ndarray | None = None
    # for any other score: its values on bootstrap samples, see `bootstrap_scores`
    replicates: np.ndarray | None = None
    images: int = 0  # number of images behind `replicates`; 0: many
    # ends of its interval, if only they were recorded
    ends: tuple[float, float] | None = None
    share: bool = True  # whether the score is a share: its interval ends at 0 and 1

    def interval(self) -> tuple[float, float]:
        if self.ends is not None:
            return self.ends
        if self.right is not None:
            return wilson_interval(self.value, len(self.right))
        assert self.replicates is not None
        ends = bootstrap_interval(self.value, self.replicates, self.images)
        return clip_to_share(*ends) if self.share else ends

    def minus(self, baseline: Samples) -> tuple[float, float, float]:
        """Return the difference from another model on the same images, and its ends."""
        difference = self.value - baseline.value
        if self.right is not None and baseline.right is not None:
            gained = int((self.right & ~baseline.right).sum())
            lost = int((baseline.right & ~self.right).sum())
            return difference, *paired_interval(gained, lost, len(self.right))
        assert self.replicates is not None
        assert baseline.replicates is not None
        replicates = self.replicates - baseline.replicates
        return difference, *bootstrap_interval(difference, replicates, self.images)

    def record(self) -> dict[str, Any]:
        """Return JSON values: a hexadecimal digit for four images, or replicates."""
        if self.right is not None:
            return {
                "value": self.value,
                "images": len(self.right),
                "right": np.packbits(self.right).tobytes().hex(),
            }
        assert self.replicates is not None
        record = {
            "value": self.value,
            "images": self.images,
            "replicates": [round(float(value), 6) for value in self.replicates],
        }
        if not self.share:
            record["share"] = False
        return record

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> Samples:
        if "right" in recorded:
            bits = np.unpackbits(
                np.frombuffer(bytes.fromhex(recorded["right"]), np.uint8),
                count=recorded["images"],
            )
            return cls(recorded["value"], right=bits.astype(bool))
        return cls(
            recorded["value"],
            replicates=np.array(recorded["replicates"], np.float64),
            images=recorded["images"],
            share=recorded.get("share", True),
        )
