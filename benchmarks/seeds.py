"""Does distillation help? The main job for several seeds: teacher, student distilled, student on labels alone.

Run: python benchmarks/seeds.py [--seeds 0 1 2] [key=value ...]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import kd
from _record import write

CONFIG = Path(__file__).parent.parent / "configs" / "vit_food.yaml"


def main() -> None:
    """Run all seeds and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    rows = []
    for seed in given.seeds:
        run = kd.train(CONFIG, f"run.seed={seed}", f"run.name=seeds_{seed}", "run.baseline=true", *given.overrides)
        assert run.baseline is not None
        rows.append(
            {
                "seed": seed,
                "teacher": round(run.metrics["teacher_accuracy"], 4),
                "distilled": round(run.metrics["accuracy"], 4),
                "labels_only": round(run.baseline.metrics["accuracy"], 4),
                "agreement": round(run.metrics["agreement"], 4),
                "images_per_second": round(run.images_per_second, 1),
                "images_per_second_labels_only": round(run.baseline.images_per_second, 1),
            }
        )
        print(rows[-1], flush=True)
    for name in ("teacher", "distilled", "labels_only"):
        values = [row[name] for row in rows]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name:12s} {100 * statistics.mean(values):.1f} +- {100 * spread:.1f} %")
    write("seeds", " ".join(["python benchmarks/seeds.py", *sys.argv[1:]]), rows)


if __name__ == "__main__":
    main()
