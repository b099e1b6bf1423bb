"""How often an interval from 200 images holds the score on all images: accuracy, a
difference of two models, mAP.

Run: python benchmarks/intervals.py --data FOLDER [--images 200] [--samples 10000]

FOLDER has train/<class>/ and test/<class>/, such as CIFAR-10. The models are small:
ridge regressions of the classes on pixels of 16 x 16 and of 4 x 4. Each sample is drawn
from the test images, no image twice, and is scored as kd does; the score on all test
images is the truth. For mAP each class is answered alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from _record import write
from kd.core.intervals import Samples, bootstrap_scores
from kd.parts.tasks.embedding import ridge
from kd.parts.tasks.label_sets import score

TRAIN = 2000
"""Training images of each class."""


def pixels(folder: Path, limit: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images as vectors of length 1 [N, D] and their classes [N]."""
    vectors = []
    labels = []
    for label, name in enumerate(sorted(path.name for path in folder.iterdir())):
        for path in sorted((folder / name).iterdir())[:limit]:
            image = (
                Image.open(path)
                .convert("RGB")
                .resize((side, side), Image.Resampling.BOX)
            )
            vectors.append(np.asarray(image, np.float32).ravel() / 255 - 0.5)
            labels.append(label)
    return torch.nn.functional.normalize(
        torch.from_numpy(np.stack(vectors)), dim=1
    ), torch.tensor(labels)


def answers(folder: Path, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores [N, C] of a model for all test images, and their
    classes [N].
    """
    known_ND, label_N = pixels(folder / "train", TRAIN, side)
    asking_MD, wanted_M = pixels(folder / "test", 10**6, side)
    return ridge(known_ND, label_N, asking_MD, int(label_N.max()) + 1).float(), wanted_M


def coverage(
    name: str, truth: float, ends: list[tuple[float, float]]
) -> dict[str, object]:
    """Return how many intervals hold the truth, as a share of 100 samples."""
    inside = np.array([low <= truth <= high for low, high in ends])
    half = np.mean([(high - low) / 2 for low, high in ends])
    row = {
        "score": name,
        "on_all": round(truth, 4),
        "samples": len(ends),
        "held_of_100": round(100 * float(inside.mean()), 1),
    }
    return {**row, "half_width": round(float(half), 4)}


def main() -> None:
    """Draw samples, count, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--samples", type=int, default=10_000)
    options = parser.parse_args()
    (large, label), (small, _) = (answers(options.data, side) for side in (16, 4))
    large_right, small_right = (
        (logits.argmax(1) == label).numpy() for logits in (large, small)
    )
    truth = torch.nn.functional.one_hot(label) > 0
    draw = np.random.default_rng(0)
    drawn = [
        draw.choice(len(label), options.images, replace=False)
        for _ in range(options.samples)
    ]

    def shares(chosen: np.ndarray) -> tuple[Samples, Samples]:
        first = large_right[chosen]
        second = small_right[chosen]
        return Samples(first.mean(), right=first), Samples(second.mean(), right=second)

    def precision(chosen: np.ndarray) -> tuple[float, float]:
        logits_of_part = large[chosen]
        right = truth[chosen]

        def of(ids: np.ndarray) -> float:
            return score(logits_of_part[ids], right[ids])["map"]

        return Samples(
            score(logits_of_part, right)["map"],
            replicates=bootstrap_scores(of, len(chosen)),
        ).interval()

    kinds: dict[str, tuple[float, Callable[[np.ndarray], tuple[float, float]], int]] = {
        "accuracy (Wilson)": (
            large_right.mean(),
            lambda chosen: shares(chosen)[0].interval(),
            options.samples,
        ),
        "accuracy of the smaller model (Wilson)": (
            small_right.mean(),
            lambda chosen: shares(chosen)[1].interval(),
            options.samples,
        ),
        "difference of the two (paired)": (
            large_right.mean() - small_right.mean(),
            lambda chosen: shares(chosen)[0].minus(shares(chosen)[1])[1:],
            options.samples,
        ),
        "mAP (bootstrap)": (
            score(large, truth)["map"],
            precision,
            min(options.samples, 100),
        ),
    }
    rows = []
    for name, (on_all, interval, count) in kinds.items():
        rows.append(
            coverage(
                name, float(on_all), [interval(chosen) for chosen in drawn[:count]]
            )
        )
        print(rows[-1], flush=True)
    words = [
        "FOLDER" if before == "--data" else word
        for before, word in zip(sys.argv, sys.argv[1:], strict=False)
    ]
    write("intervals", " ".join(["python benchmarks/intervals.py", *words]), rows)


if __name__ == "__main__":
    main()
