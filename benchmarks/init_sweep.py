"""Is the file that `kd init` writes a good one? A sweep of nine runs around it, on
three folders.

Run: python benchmarks/init_sweep.py FOLDER WEIGHTS [--work FOLDER] [key=value ...]

FOLDER has train/, val/ and test/ with class folders, WEIGHTS is a file for `kd init
--teacher`. The file is written, `kd-sweep` trains it with three temperatures by three
rates, of which the middle ones are the file's, one teacher and cache for all, and each
trial is scored on the test images, which chose nothing. A row a trial; the middle one
is the file's own. Interrupted, the same command goes on. One process of one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from _record import commit, newest, write
from kd.core.intervals import wilson_interval

FACTORS = {"losses.0.temperature": (0.5, 1, 2), "optimizer.lr": (1 / 3, 1, 3)}


def call(*words: str) -> None:
    """Run a command of kd."""
    subprocess.run(
        [sys.executable, "-m", "kd", *words], check=True, stdout=subprocess.DEVNULL
    )


def main() -> None:
    """Write the file, sweep, score, and add the rows to the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs", "init_sweep"))
    parser.add_argument("overrides", nargs="*", help="key=value for all runs")
    options = parser.parse_intermixed_args()
    name = options.folder.resolve().name
    file = options.work / f"{name}.yaml"
    if not file.is_file():
        options.work.mkdir(parents=True, exist_ok=True)
        folder = str(options.folder.resolve())
        weights = str(options.weights.resolve())
        call("init", folder, "--teacher", weights, "--student-mb", "4", "-o", str(file))
    content: dict[str, Any] = yaml.safe_load(file.read_text())
    values = {
        "losses.0.temperature": content["losses"][0]["temperature"],
        "optimizer.lr": content["optimizer"]["lr"],
    }
    lists = [
        f"{key}={','.join(f'{values[key] * by:.4g}' for by in factors)}"
        for key, factors in FACTORS.items()
    ]
    common = [f"run.folder={options.work}", "backend.threads=1", *options.overrides]
    call("sweep", str(file), *common, *lists)
    rows = [row for row in newest("init_sweep")[1] if row["folder"] != name]
    for trial in sorted((options.work / f"{name}_sweep").glob("*/config.yaml")):
        call(
            "train", str(trial.parent.parent / f"{trial.parent.name}.yaml")
        )  # it has ended: scores the test images
        config = yaml.safe_load(trial.read_text())
        steps = [
            json.loads(line)
            for line in (trial.parent / "metrics.jsonl").read_text().splitlines()
        ]
        scored = json.loads((trial.parent / "scored.json").read_text())
        score = scored["row"]["accuracy"]
        images = scored["images"]
        low, high = wilson_interval(score, images)
        rows.append(
            {
                "folder": name,
                "temperature": config["losses"][0]["temperature"],
                "lr": config["optimizer"]["lr"],
                "views": config["teacher"]["cache"]["views"],
                "seed": config["run"]["seed"],
                "validation": round(
                    100
                    * max(
                        step_row["accuracy"]
                        for step_row in steps
                        if step_row["kind"] == "val"
                    ),
                    2,
                ),
                "test": round(100 * score, 2),
                "low": round(100 * low, 2),
                "high": round(100 * high, 2),
                "images": images,
                "teacher": round(100 * scored["row"].get("teacher_accuracy", 0), 2),
                "commit": commit(),
            }
        )
        print(rows[-1], flush=True)
    write(
        "init_sweep",
        "python benchmarks/init_sweep.py FOLDER WEIGHTS " + " ".join(options.overrides),
        rows,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
