"""Which checkpoint should be used? The highest score of few validation images is often
luck.

Run: python benchmarks/choice_of_checkpoint.py RUN [RUN ...]

Each RUN is a run folder with a test split and all its checkpoints (`run.keep`), one at
each evaluation. All are scored on the test images. Then some of these images are drawn
as if they were the validation images, 4,000 times, each rule chooses a checkpoint by
them, and it is scored on the other images. Each run is a process of its own before:
this script trains nothing.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from _record import write
from kd.jobs.evaluate import evaluate

DRAWS = 4000
IMAGES = (50, 111, 250, 500)
Rule = Callable[[np.ndarray, int], int]


def newest_near(scores: np.ndarray, images: int) -> int:
    """Return kd's choice: the newest at most one standard error below the highest."""
    best = float(scores.max())
    return int(
        np.flatnonzero(scores >= best - math.sqrt(best * (1 - best) / images))[-1]
    )


RULES: dict[str, Rule] = {
    "highest": lambda scores, images: int(scores.argmax()),
    "newest within one standard error": newest_near,
    "newest": lambda scores, images: len(scores) - 1,
}


def accuracies(right_KN: np.ndarray, images: int, rule: Rule) -> np.ndarray:
    """Return the accuracy of the chosen checkpoint of K on the images that were not
    drawn, [DRAWS].
    """
    draw = np.random.default_rng(0)
    shares = np.empty(DRAWS)
    for number in range(DRAWS):
        order = draw.permutation(right_KN.shape[1])
        chosen = rule(right_KN[:, order[:images]].mean(1), images)
        shares[number] = right_KN[chosen, order[images:]].mean()
    return shares


def scored(run: Path) -> tuple[list[int], np.ndarray]:
    """Return the steps of a run's checkpoints, and which test images each predicts
    correctly, bool [K, N].
    """
    steps = []
    right = []
    for checkpoint in sorted((run / "checkpoints").iterdir()):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / run.name
            shutil.copytree(run, copy, ignore=lambda path, names, keep=checkpoint: {
                name for name in names if Path(path).name == "checkpoints" and name != keep.name
            })  # fmt: skip
            is_right = (
                evaluate(copy, trust=True, split="test").samples["accuracy"].right
            )
        assert is_right is not None
        steps.append(int(checkpoint.name.partition("_")[2]))
        right.append(is_right)
    return steps, np.array(right)


def main() -> None:
    """Score the runs and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    rows = []
    for run in parser.parse_args().runs:
        steps, right_KN = scored(run)
        test = " ".join(
            f"{step}:{100 * value.mean():.1f}"
            for step, value in zip(steps, right_KN, strict=True)
        )
        for images in IMAGES:
            for name, rule in RULES.items():
                percent = 100 * accuracies(right_KN, images, rule)
                numbers = {
                    "accuracy": percent.mean(),
                    "tenth": np.quantile(percent, 0.1),
                }
                about = {
                    "run": run.name,
                    "test_by_step": test,
                    "images": images,
                    "rule": name,
                }
                rows.append(
                    {
                        **about,
                        **{
                            key: round(float(value), 2)
                            for key, value in numbers.items()
                        },
                    }
                )
                print(rows[-1])
    write(
        "choice_of_checkpoint",
        "python benchmarks/choice_of_checkpoint.py RUN RUN",
        rows,
    )


if __name__ == "__main__":
    main()
