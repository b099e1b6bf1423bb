"""Do fewer tokens pay? A ViT student that sees all patches, three quarters or half of them, for the same CPU time.

    python benchmarks/tokens.py data.root=PATH/cifar10 [teacher.checkpoint=FILE] [--work runs/tokens] [--seeds 0 1 2]

timm's patch dropout (arXiv:2208.07220) leaves out random patches of a training image; evaluation sees all. The teacher
of configs/cifar10.yaml looks at 32 px, the student has 64 patches of 8 x 8 of 64 px. All arms of a seed take the same
stored answers to 4 views. A few steps of each arm are timed in turns, and the shorter a step, the more of them follow:
the time of `--epochs` passes with all patches. One thread. A row that is in WORK/tokens.jsonl is not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from frontier import KEYS, STUDENTS, shown

import kd
from _record import write
from kd.config.flat import plain
from kd.intervals import wilson
from kd.jobs.cache import cache

SHARES = (0.0, 0.25, 0.5)  # of the patches that are left out
SIZES = {"steps": 40, "rounds": 3}  # of the timing
NOT_HERE = ("run.name", "run.epochs")
IMAGES = 45_000  # of a pass


def train(options: argparse.Namespace, share: float, seed: int, steps: int, name: str) -> dict[str, Any]:
    """Train a student on stored answers; return its test accuracy and what it took."""
    vit = STUDENTS["vit_8"]
    settings = {**plain("cifar10"), "student": {**vit, "args": {**vit["args"], "patch_drop_rate": share}}}
    keys = [key for key in KEYS if not key.startswith(NOT_HERE)]
    own = ["teacher.cache.views=4", "run.every.log=1"]
    run = [f"run.folder={options.work}", f"run.name={name}", f"run.seed={seed}", f"run.steps={steps}"]
    loaded = kd.load_config(settings, [*keys, *own, *run, *options.overrides])
    cache(loaded)  # before the clock: what is stored is left as it is
    start = time.process_time()
    folder = kd.train(loaded).folder
    minutes = (time.process_time() - start) / 60
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [row["step_ms"] for row in rows if row["kind"] == "train"]
    scored = json.loads((folder / "scored.json").read_text())
    accuracy = scored["row"]["accuracy"]
    percents = [round(100 * value, 2) for value in (accuracy, *wilson(accuracy, scored["images"]))]
    row = {"left_out": share, "seed": seed, "steps": steps}
    row |= dict(zip(("accuracy", "low", "high"), percents, strict=True))
    return {**row, "ms_a_step": round(statistics.median(times[len(times) // 4 :]), 2), "cpu_minutes": round(minutes, 2)}


def main() -> None:
    """Time the arms, train what is missing, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs", "tokens"))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("overrides", nargs="*", help="key=value for all")
    options = parser.parse_intermixed_args()
    options.work.mkdir(parents=True, exist_ok=True)
    timed, file = options.work / "timed.json", options.work / "tokens.jsonl"
    if not timed.is_file():
        found: dict[str, list[float]] = {str(share): [] for share in SHARES}
        for turn in range(SIZES["rounds"]):
            for share in SHARES:
                row = train(options, share, options.seeds[0], SIZES["steps"], f"timed-{share}-{turn}")
                found[str(share)].append(row["ms_a_step"])
        timed.write_text(json.dumps({share: statistics.median(ms) for share, ms in found.items()}))
    ms = json.loads(timed.read_text())
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    done = {(row["left_out"], row["seed"]) for row in rows}
    whole = options.epochs * IMAGES // 64
    for seed in options.seeds:
        for share in SHARES:
            if (share, seed) in done:
                continue
            steps = round(whole * ms["0.0"] / ms[str(share)])
            rows.append(train(options, share, seed, steps, f"tokens-{share}-{seed}"))
            with file.open("a") as opened:
                opened.write(json.dumps(rows[-1]) + "\n")
            print(rows[-1], flush=True)
    write("tokens_cifar10", shown(["python benchmarks/tokens.py", *sys.argv[1:]]), rows)


if __name__ == "__main__":
    main()
