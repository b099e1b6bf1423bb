"""What does patience buy? The student of the main job after 8 to 80 epochs, distilled
and on labels alone, three seeds.

One teacher is fitted for all, for 20 epochs. Its answers to eight views of each image
are cached before, once for each seed. Each length is a run of its own, with its own
schedule of the learning rate; only its last evaluation counts. CPU time is that of the
student's run on one thread: it depends little on neighbours. The teacher's is not in
it.

Run: python benchmarks/patience.py [--seeds 0 1 2] [--epochs 8 16 40 80] [--labels 8 16 40] [--label-seeds 0 1 2]

Finished runs are kept in runs/patience.jsonl and not made again. Writes the CSV and
docs/patience.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

import kd
from _record import write
from kd.jobs.fill_cache import cache
from kd.jobs.train import teach
from kd.study.report.charts import FILE, Axis, Level, Series, lines

CONFIG = Path(__file__).parents[1] / "configs" / "vit_food_scratch.yaml"
PINS = [
    "backend.threads=1",
    "backend.precision=fp32",
    "data.workers=0",
    "data.store=ram",
    "run.baseline=false",
]
VIEWS = 8
FIT_EPOCHS = 20
ROWS = Path("runs", "patience.jsonl")
COLORS = {"--accent": "#2f6fde", "--labels": "#d9822b", "--soft": "#667085"}


def one_run(teacher: Path, student: str, seed: int, epochs: int) -> dict[str, Any]:
    """Train a student and return its row."""
    settings = yaml.safe_load(CONFIG.read_text())
    settings["teacher"] = {}
    keys_of_arm = ["losses=[{kind: ce}]", f"data.views={VIEWS}"]
    if student == "distilled":
        settings["teacher"] = {
            "model": str(teacher),
            "precision": "fp32",
            "cache": {"views": VIEWS},
        }
        keys_of_arm = []
    steps = 93 * epochs
    keys = [
        f"run.seed={seed}",
        f"run.epochs={epochs}",
        f"run.name=patience_{student}_{seed}_{epochs}",
    ]
    if student == "distilled":
        cache(kd.load_config(settings, [*PINS, *keys]))
    begun = time.process_time()
    run = kd.train(
        settings,
        *PINS,
        *keys_of_arm,
        *keys,
        f"run.every.evaluate={steps}",
        f"run.every.log={steps // 8}",
    )
    return {
        "student": student,
        "seed": seed,
        "epochs": epochs,
        "accuracy": round(run.metrics["accuracy"], 4),
        "teacher": (
            round(run.metrics["teacher_accuracy"], 4) if student == "distilled" else ""
        ),
        "cpu_minutes": round((time.process_time() - begun) / 60, 2),
    }


def measured(
    teacher: Path, student: str, seeds: Sequence[int], epochs: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row of each run of a kind of student; make those that are not there."""
    earlier_rows = (
        [json.loads(line) for line in ROWS.read_text().splitlines()]
        if ROWS.exists()
        else []
    )
    rows = {(row["student"], row["seed"], row["epochs"]): row for row in earlier_rows}
    for length in epochs:
        for seed in seeds:
            if (student, seed, length) not in rows:
                rows[student, seed, length] = row = one_run(
                    teacher, student, seed, length
                )
                print(row, flush=True)
                with ROWS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return [rows[student, seed, length] for length in epochs for seed in seeds]


def curve(rows: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Return epochs, mean accuracy and its standard deviation, sorted by epochs."""
    points = []
    for epochs in sorted({row["epochs"] for row in rows}):
        same = [row for row in rows if row["epochs"] == epochs]
        values = [row["accuracy"] for row in same]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        points.append((epochs, statistics.mean(values), spread))
    return points


def plot(rows: list[dict[str, Any]]) -> str:
    """Return the curves as an SVG file."""
    names = {"distilled": "distilled student", "labels": "same student, labels only"}
    series = []
    for name, color in (("distilled", "--accent"), ("labels", "--labels")):
        points = curve([row for row in rows if row["student"] == name])
        if points:
            epochs = [point[0] for point in points]
            accuracy = [point[1] for point in points]
            series.append(Series(names[name], COLORS[color], epochs, accuracy))
    teacher = statistics.mean(row["teacher"] for row in rows if row["teacher"])
    levels = [Level("teacher", COLORS["--soft"], y=teacher)]
    return lines(series, (640, 330), Axis("epochs"), Axis(unit="%"), levels).svg(FILE)


def main() -> None:
    """Make the runs, write the CSV and the plot, print the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, nargs="+", default=[8, 16, 40, 80])
    parser.add_argument(
        "--labels",
        type=int,
        nargs="*",
        default=[8, 16, 40],
        help="epochs of the student on labels alone",
    )
    parser.add_argument("--label-seeds", type=int, nargs="*", default=[0, 1, 2])
    options = parser.parse_args()
    fitted = teach(
        kd.load_config(
            CONFIG,
            [*PINS, f"teacher.fit.epochs={FIT_EPOCHS}", "teacher.precision=fp32"],
        )
    )[0]
    rows = measured(fitted, "distilled", options.seeds, options.epochs)
    rows += measured(fitted, "labels", options.label_seeds, options.labels)
    for name in ("distilled", "labels"):
        for epochs, mean, spread in curve(
            [row for row in rows if row["student"] == name]
        ):
            print(
                f"{name:9s} {epochs:3d} epochs {100 * mean:.1f} +- {100 * spread:.1f} %"
            )
    (
        Path(os.environ.get("OUT") or CONFIG.parents[1] / "docs") / "patience.svg"
    ).write_text(plot(rows))
    write("patience", " ".join(["python benchmarks/patience.py", *sys.argv[1:]]), rows)


if __name__ == "__main__":
    main()
