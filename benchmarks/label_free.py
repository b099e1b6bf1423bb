"""What do labels add? vit_food's student with its labels withheld, with them, and with a term on them, for three seeds.

One teacher is fitted for all. vit_food's loss is KL alone: its labels only choose the best checkpoint. The run without
labels chooses it by agreement with the teacher; its student is then scored on the labels.

Run: python benchmarks/label_free.py [--seeds 0 1 2] [--steps 465] [--fit 465]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import yaml

import kd
from _record import write
from kd.jobs.evaluate import evaluate
from kd.jobs.teach import teach

CONFIG = Path(__file__).parents[1] / "configs" / "vit_food.yaml"


def main() -> None:
    """Run all seeds and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=465, help="of each student")
    parser.add_argument("--fit", type=int, default=465, help="steps of the teacher")
    given = parser.parse_args()
    fitted = teach(kd.load_config(CONFIG, [f"teacher.fit.steps={given.fit}"]))[0]
    settings = yaml.safe_load(CONFIG.read_text())
    settings["teacher"] = {"model": str(fitted)}
    terms = {
        "withheld": ["data.labels=none"],
        "labelled": [],
        "labelled_ce": ["losses=[{kind: kl, temperature: 2.0}, {kind: ce, weight: 0.5}]"],
    }
    rows = []
    for seed in given.seeds:
        row: dict[str, float] = {"seed": seed}
        for name, overrides in terms.items():
            shared = [f"run.seed={seed}", f"run.name=label_free_{name}_{seed}", "run.baseline=false"]
            shared += [f"run.steps={given.steps}", "teacher.precision=fp32", "backend.threads=1"]
            run = kd.train(settings, *shared, *overrides)
            values = evaluate(run.folder, ["data.labels=all"]).row if name == "withheld" else run.metrics
            row |= {name: round(values["accuracy"], 4), f"{name}_agreement": round(values["agreement"], 4)}
            row["teacher"] = round(values["teacher_accuracy"], 4)
        rows.append(row)
        print(row, flush=True)
    for name in terms:
        found = [row[name] for row in rows]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        print(f"{name:12s} {100 * statistics.mean(found):.1f} +- {100 * spread:.1f} %")
    write("label_free", " ".join(["python benchmarks/label_free.py", *sys.argv[1:]]), rows)


if __name__ == "__main__":
    main()
