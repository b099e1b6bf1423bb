"""Which loss distills best: every loss alone and beside the labels, three seeds, on
food_mini over one cache.

Run: python benchmarks/losses.py --work FOLDER [--seeds 0 1 2] [--epochs 8] [--losses kl
     dkd] [--name losses] python benchmarks/losses.py --work FOLDER --images FOLDER
     --teacher-epochs 30    (train/<class>/, val/<class>/)

Each setting runs with the first seed. The best setting of a loss, by accuracy, runs
with the others; its mean leaves the first seed out, since that seed chose it. A row
that is in FOLDER/losses.csv is not made again. One thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from regimes import append, earlier, settings

from _record import write
from kd import config
from kd.core.text import markdown_table
from kd.jobs.fill_cache import cache
from kd.jobs.train import teach, train

Terms = list[dict[str, Any]]
CE: dict[str, Any] = {"kind": "ce"}
KL: dict[str, Any] = {"kind": "kl", "temperature": 2.0}
DKD = ((8.0, 4.0), (2.0, 2.0))
PICTURES = {"train_images": 125, "label_noise": 0.05}


def sweep() -> dict[str, dict[str, Terms]]:
    """Return the settings of each loss by name: the terms of the configuration."""
    settings: dict[str, dict[str, Terms]] = {
        "ce": {"alone": [CE], "smoothing 0.1": [{**CE, "label_smoothing": 0.1}]}
    }
    for kind in ("kl", "dist", "wttm"):
        term = KL if kind == "kl" else {"kind": kind}
        settings[kind] = {"alone": [term], "4 x + ce": [{**term, "weight": 4.0}, CE]}
    settings["kl"]["temperature 4"] = [{**KL, "temperature": 4.0}]
    settings["dkd"] = {
        f"beta {beta:g}, T {t:g}": [{"kind": "dkd", "beta": beta, "temperature": t}]
        for beta, t in DKD
    }
    return settings


def run_one(
    base: dict[str, Any], kind: str, setting: str, terms: Terms, seed: int
) -> dict[str, Any]:
    """Train one setting with one seed and return its row."""
    name = f"{kind}-{setting}-{seed}".replace(" ", "_").replace(",", "")
    loaded = config.load(
        {**base, "losses": terms}, [f"run.seed={seed}", f"run.name={name}"]
    )
    if kind != "ce":
        cache(loaded)
    cpu = time.process_time()
    values = train(loaded).metrics
    percents = {
        key: round(100 * values[key], 2)
        for key in ("accuracy", "agreement", "ece")
        if key in values
    }
    return {
        "loss": kind,
        "setting": setting,
        "seed": seed,
        "accuracy": percents["accuracy"],
        "agreement": percents.get("agreement", 0.0),
        "calibration_error": percents["ece"],
        "nll": round(values["nll"], 4),
        "job_cpu_seconds": round(time.process_time() - cpu, 1),
    }


def best(rows: Sequence[dict[str, Any]], kind: str, seed: int) -> str:
    """Return the setting of a loss that was the most accurate with a seed."""
    of_loss = [row for row in rows if (row["loss"], row["seed"]) == (kind, seed)]
    return max(of_loss, key=lambda row: row["accuracy"])["setting"]


def summary(rows: Sequence[dict[str, Any]], seeds: Sequence[int]) -> str:
    """Return the table of the losses at their best setting, as Markdown."""
    lines = []
    for kind in dict.fromkeys(row["loss"] for row in rows):
        setting = best(rows, kind, seeds[0])
        swept = [row for row in rows if (row["loss"], row["seed"]) == (kind, seeds[0])]
        of_loss = [
            row
            for row in rows
            if (row["loss"], row["setting"]) == (kind, setting)
            and row["seed"] != seeds[0]
        ]
        of_loss = of_loss or [
            row for row in rows if (row["loss"], row["setting"]) == (kind, setting)
        ]

        def mean(key: str, of_loss: Sequence[dict[str, Any]] = of_loss) -> float:
            return statistics.mean(row[key] for row in of_loss)

        lines.append(
            {
                "loss": kind,
                "setting": setting,
                "accuracy": f"{mean('accuracy'):.1f}",
                "agreement": f"{mean('agreement'):.1f}" if mean("agreement") else "",
                "calibration error": f"{mean('calibration_error'):.1f}",
                "nll": f"{mean('nll'):.2f}",
                "all settings, first seed": ", ".join(
                    f"{r['setting']}: {r['accuracy']:.1f}" for r in swept
                ),
            }
        )
    return markdown_table(lines)


def main() -> None:
    """Run what is missing; write the CSV and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", required=True)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--images", help="a folder of images instead of food_mini")
    parser.add_argument("--teacher-epochs", type=int, default=12)
    parser.add_argument(
        "--losses", nargs="*", default=list(sweep()), choices=list(sweep())
    )
    parser.add_argument("--name", default="losses", help="of the CSV")
    parser.add_argument(
        "--write", action="store_true", help="write the CSV with what is there"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = Path(options.work)
    file = work / "losses.csv"
    if not options.write:
        base, first = (
            settings(work, pictures) for pictures in (PICTURES, {"train_images": 250})
        )
        if options.images:
            base["data"] = {
                k: v
                for k, v in base["data"].items()
                if k not in (*PICTURES, "kind", "root")
            }
            base["data"] |= {"kind": "imagefolder", "root": options.images}
            first["data"] = base["data"]
        first["teacher"]["fit"]["epochs"] = options.teacher_epochs
        fitted = teach(config.load(first))[0]
        base["run"]["epochs"] = options.epochs
        base["teacher"] |= {
            "model": str(fitted),
            "args": {},
            "fit": {},
            "cache": {"views": 4},
        }
        for turn, seed in enumerate(options.seeds):
            for kind, named in (
                (kind, named)
                for kind, named in sweep().items()
                if kind in options.losses
            ):
                chosen = (
                    list(named)
                    if turn == 0
                    else [best(earlier(file), kind, options.seeds[0])]
                )
                for setting in chosen:
                    finished = {
                        (row["loss"], row["setting"], row["seed"])
                        for row in earlier(file)
                    }
                    if (kind, setting, seed) not in finished:
                        append(file, run_one(base, kind, setting, named[setting], seed))
    rows = earlier(file)
    print(summary(rows, options.seeds))
    command = f"python benchmarks/losses.py --work FOLDER --epochs {options.epochs}"
    command += (
        f" --images FOLDER --teacher-epochs {options.teacher_epochs}"
        if options.images
        else ""
    )
    write(options.name, command, rows, None if options.write else work)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
