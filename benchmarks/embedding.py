"""Does an embedding student learn what its teacher sees? Nearest neighbours of teacher,
student and random weights.

One teacher fits the labels of `configs/vit_food_scratch.yaml` (seed 0) and is then used
without its classifier. A student of each seed learns its vectors, without labels; what
stands in the run's manifest before step 1 are random weights. `recall` and `found` are
of the student's projected vectors in an index of the teacher's.

Run: python benchmarks/embedding.py [--seeds 0 1 2] [--fit-epochs 3] [key=value ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import kd
from _record import write
from kd import config
from kd.jobs.train import teach

CONFIG = Path(__file__).parent.parent / "configs" / "vit_food_scratch.yaml"
LOSSES = "losses=[{kind: cosine}, {kind: cckd}]"


def main() -> None:
    """Fit the teacher, run all seeds and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--fit-epochs", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    fit = f"teacher.fit.epochs={options.fit_epochs}"
    (teacher,) = teach(config.load(CONFIG, [fit, *options.overrides]))
    rows = []
    for seed in options.seeds:
        keys = [
            LOSSES,
            "run.baseline=false",
            f"teacher.checkpoint={teacher}",
            fit,
            "run.every.evaluate=0",
        ]
        run = kd.train(
            CONFIG,
            f"run.seed={seed}",
            f"run.name=embedding_{seed}",
            *keys,
            *options.overrides,
        )
        before = json.loads((run.folder / "manifest.json").read_text())["before"]
        row: dict[str, float] = {"seed": seed}
        for kind in ("knn", "probe"):
            row |= {
                f"teacher_{kind}": run.metrics[f"teacher_{kind}"],
                f"student_{kind}": run.metrics[kind],
            }
            row[f"random_{kind}"] = before[kind]
        row |= {
            "agreement": run.metrics["agreement"],
            "random_agreement": before["agreement"],
        }
        recall = run.metrics["recall"]
        teacher_recall = run.metrics["teacher_recall"]
        row |= {
            "teacher_recall": teacher_recall,
            "student_recall": recall,
            "random_recall": before["recall"],
        }
        row |= {
            "recall_of_teachers": recall / teacher_recall,
            "found": run.metrics["found"],
            "random_found": before["found"],
        }
        rows.append({name: round(value, 4) for name, value in row.items()})
        print(rows[-1], flush=True)
    for name in rows[0]:
        if name != "seed":
            values = [row[name] for row in rows]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(f"{name:18s} {statistics.mean(values):.3f} +- {spread:.3f}")
    write(
        "embedding", " ".join(["python benchmarks/embedding.py", *sys.argv[1:]]), rows
    )


if __name__ == "__main__":
    main()
