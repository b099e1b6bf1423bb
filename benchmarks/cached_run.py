"""Is a run with the teacher's cache the run without it? The main job, several seeds:
accuracy, loss curve, forwards.

Run: python benchmarks/cached_run.py [--seeds 0 1 2] [--views 4] [--config FILE] [key=value ...]

For each seed four runs of one configuration, kernels and threads pinned: `fresh` (live,
new views each epoch), `live` (live, V views), `ahead` (cache in float32, filled by
kd-cache before), `filling` (cache in float16, filled on the way). `live` and `ahead`
must agree in every bit of the loss, `live` and `filling` to the rounding of float16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import kd
from _record import write
from kd.jobs.fill_cache import cache

CONFIG = Path(__file__).parent.parent / "configs" / "vit_food_scratch.yaml"
PINS = (
    "run.baseline=false",
    "run.every.log=1",
    "backend.precision=fp32",
    "backend.threads=1",
    "teacher.precision=fp32",
    "teacher.attention=unfused",
    "student.attention=unfused",
)


def runs(views: int) -> dict[str, tuple[str, ...]]:
    """Return the overrides of the four runs."""
    return {
        "fresh": (),
        "live": (f"data.views={views}",),
        "ahead": (f"teacher.cache.views={views}", "teacher.cache.dtype=fp32"),
        "filling": (f"teacher.cache.views={views}",),
    }


def train_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the training rows of a run, one a step."""
    rows = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    return [row for row in rows if row["kind"] == "train"]


def forwards(steps: list[dict[str, Any]]) -> str:
    """Return how many images the teacher's forward ran on, epoch by epoch; a row's
    epoch is that of the next step.
    """
    counts: dict[int, int] = {}
    for before, row in zip([{"epoch": 0}, *steps], steps, strict=False):
        counts[before["epoch"]] = counts.get(before["epoch"], 0) + int(
            row["teacher_images"]
        )
    return " ".join(str(count) for _, count in sorted(counts.items()))


def worst(curve: list[float], reference: list[float], steps: int) -> float:
    """Return the largest relative difference of two loss curves in their
    first steps.
    """
    return max(
        abs(a - b) / abs(b)
        for a, b in zip(curve[:steps], reference[:steps], strict=True)
    )


def one_seed(
    config: str, seed: int, views: int, work: str, overrides: list[str]
) -> list[dict[str, Any]]:
    """Make the four runs of a seed; return a row each."""
    curves: dict[str, list[float]] = {}
    rows = []
    for name, keys_of_run in runs(views).items():
        keys = (
            *PINS,
            *overrides,
            *keys_of_run,
            f"run.seed={seed}",
            f"run.folder={work}",
            f"run.name={name}_{seed}",
        )
        if name == "ahead":
            filled = cache(kd.load_config(config, keys))
            print(
                f"seed {seed}: kd-cache ran the teacher on {filled.computed} images,"
                f" {filled.missing} missing"
            )
        run = kd.train(config, *keys)
        steps = train_rows(run.folder)
        curve = curves[name] = [row["loss"] for row in steps]
        same = {"bits_of_live": "", "first_10_steps": "", "all_steps": ""}
        if name in ("ahead", "filling"):
            live = curves["live"]
            same = {
                "bits_of_live": str(curve == live),
                "first_10_steps": f"{worst(curve, live, 10):.2g}",
            }
            same["all_steps"] = f"{worst(curve, live, len(live)):.2g}"
        facts = {
            "accuracy": run.metrics["accuracy"],
            "teacher_accuracy": run.metrics["teacher_accuracy"],
        }
        rounded = {key: round(value, 5) for key, value in facts.items()}
        rows.append(
            {
                "seed": seed,
                "run": name,
                **rounded,
                "teacher_images_by_epoch": forwards(steps),
                **same,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Make all runs and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--views", type=int, default=4)
    parser.add_argument("--config", default=str(CONFIG))
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    rows = []
    with (
        tempfile.TemporaryDirectory() as work
    ):  # runs and caches begin empty; fitted teachers are found again
        for seed in options.seeds:
            rows += one_seed(
                options.config, seed, options.views, work, options.overrides
            )
    for name in runs(options.views):
        values = [row["accuracy"] for row in rows if row["run"] == name]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(
            f"{name:8s} accuracy {100 * statistics.mean(values):.1f} +-"
            f" {100 * spread:.1f} %"
        )
    write(
        "cached_run", " ".join(["python benchmarks/cached_run.py", *sys.argv[1:]]), rows
    )


if __name__ == "__main__":
    main()
