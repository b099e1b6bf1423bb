"""Which answers of an export are sure, by the thresholds in its manifest. Imports nothing of kd.

The endpoint and `kd-predict` answer with it; `kd/deploy/export/defer.py` chooses the thresholds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Bands = tuple[tuple[float, float], ...]
"""Between which probabilities (low, high) an answer is unsure: one band for the class that is answered, or, where an
image may have several labels, one for each class. Empty: the export has no threshold."""


def bands(output: Mapping[str, Any], labels: Sequence[str]) -> Bands:
    """Return the bands in `output` of a manifest; KeyError: a label has none."""
    found = output.get("defer")
    if not found:
        return ()
    if "threshold" in found:
        return ((-1.0, float(found["threshold"])),)
    return tuple((float(found["labels"][label]["low"]), float(found["labels"][label]["high"])) for label in labels)


def mark(answers: Sequence[dict], probabilities: np.ndarray, labels: Sequence[str], unsure: Bands) -> None:
    """Add `sure` to the answers of B images with probabilities [B, C], in place; without bands nothing.

    An answer with `label` is sure where that label is. Of one with `labels` each of them, and of its `top`, has its own
    `sure`, and the image is sure where the presence or absence of every label is.
    """
    if not unsure:
        return
    low, high = np.array(unsure).T
    for answer, sure in zip(answers, (probabilities <= low) | (probabilities >= high), strict=True):
        several = "labels" in answer
        answer["sure"] = bool(sure.all() if several else sure.any())
        if several:
            by_label = dict(zip(labels, sure.tolist(), strict=True))
            for one in (*answer["labels"], *answer["top"]):
                one["sure"] = by_label[one["label"]]
