"""Several dishes on a tray: mAP of a teacher, of its distilled student, and of that
student on labels alone.

The models are those of configs/vit_food_scratch.yaml, on trays of one or two dishes of
food_mini. One teacher is fitted for all seeds.

Run: python benchmarks/multi_label.py [--seeds 0 1 2] [--steps 620] [--fit 1240]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import yaml

import kd
from _record import write
from kd.jobs.train import teach

CONFIG = Path(__file__).parents[1] / "configs" / "vit_food_scratch.yaml"
LOSS = "losses=[{kind: binary_kl, temperature: 2.0}]"


def main() -> None:
    """Run all seeds and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=620, help="of each student")
    parser.add_argument("--fit", type=int, default=1240, help="steps of the teacher")
    parser.add_argument("overrides", nargs="*", help="key=value for all")
    options = parser.parse_intermixed_args()
    shared = [
        "data.dishes=2",
        LOSS,
        "backend.threads=1",
        "run.every.evaluate=0",
        *options.overrides,
    ]
    fitted = teach(
        kd.load_config(CONFIG, [*shared, f"teacher.fit.steps={options.fit}"])
    )[0]
    settings = yaml.safe_load(CONFIG.read_text())
    settings["teacher"] = {"model": str(fitted), "precision": "fp32"}
    rows = []
    for seed in options.seeds:
        run = kd.train(
            settings,
            *shared,
            f"run.seed={seed}",
            f"run.name=multi_label_{seed}",
            f"run.steps={options.steps}",
        )
        assert run.baseline is not None
        row: dict[str, float] = {"seed": seed}
        for key in ("map", "f1_macro", "f1_micro"):
            row |= {
                f"teacher_{key}": round(run.metrics[f"teacher_{key}"], 4),
                f"distilled_{key}": round(run.metrics[key], 4),
            }
            row[f"labels_only_{key}"] = round(run.baseline.metrics[key], 4)
        row["agreement"] = round(run.metrics["agreement"], 4)
        rows.append(row)
        print(row, flush=True)
    for name in ("teacher_map", "distilled_map", "labels_only_map"):
        values = [row[name] for row in rows]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name:16s} {100 * statistics.mean(values):.1f} +- {100 * spread:.1f} %")
    write(
        "multi_label",
        " ".join(["python benchmarks/multi_label.py", *sys.argv[1:]]),
        rows,
    )


if __name__ == "__main__":
    main()
