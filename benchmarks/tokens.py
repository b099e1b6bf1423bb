"""Do fewer tokens pay? A ViT student that sees fewer patches of its training images,
for the same CPU time.

    python benchmarks/tokens.py data.root=PATH/cifar10 teacher.checkpoint=FILE [--work runs/tokens] [--seeds 0 1 2]

timm's patch dropout (arXiv:2208.07220) leaves out random patches, a quarter or half of
them; the last arm sees images of 48 px for the first 60 % of its steps. Evaluation sees
all patches of 64 px. The teacher of configs/cifar10.yaml looks at 32 px, the student
has 64 patches of 8 x 8. All arms of a seed take the same stored answers to 4 views. A
few steps of each arm are timed in turns, and the shorter a step, the more of them
follow: the time of `--epochs` passes with all patches. One thread. FILE: weights that
`full_labels.py` fitted. Rows count as made as in `full_labels.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import full_labels
import timm
import torch
from frontier import KEYS, STUDENTS, printable
from torch import Tensor, nn

import kd
from _record import commit, write
from kd.config.flat import plain
from kd.core.intervals import wilson_interval
from kd.jobs.fill_cache import cache

THEME = "tokens_cifar10"
ARMS: dict[str, dict[str, Any]] = {
    "all patches": {},
    "25 % left out": {"patch_drop_rate": 0.25},
    "50 % left out": {"patch_drop_rate": 0.5},
    "48 px first": {"small": 48},
}
FIRST = 0.6  # of the steps at the smaller size
SIZES = {"steps": 40, "rounds": 3}  # of the timing
NOT_HERE = ("run.name", "run.epochs")
IMAGES = 45_000  # of a pass
VIT = STUDENTS["vit_8"]


class Smaller(nn.Module):
    """Shrinks the images of the first `steps` training passes of the network that it is
    a hook of.
    """

    def __init__(self, size: int, steps: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("left", torch.tensor(steps))

    def forward(self, network: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        """Return the arguments of the network, images [B, 3, H, W]."""
        if not network.training or not self.left:
            return args
        self.left -= 1
        return (
            nn.functional.interpolate(
                args[0], self.size, mode="bilinear", antialias=True
            ),
        )


def growing(small: int, steps: int, classes: int = 10) -> nn.Module:
    """Return the student, which sees images of `small` pixels a side for its first
    `steps` training passes.
    """
    network = timm.create_model(
        VIT["model"],
        **VIT["args"],
        img_size=64,
        dynamic_img_size=True,
        num_classes=classes,
    )
    network.smaller = Smaller(small, steps)
    network.register_forward_pre_hook(network.smaller)
    return network


def student(arm: str, steps: int) -> dict[str, Any]:
    """Return a student's section for a run that shows it small images for `steps`
    steps.
    """
    settings = ARMS[arm]
    if "small" in settings:
        half = {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": 64}
        return {
            "kind": "torch",
            "model": "tokens:growing",
            "args": {**settings, "steps": steps},
            **half,
        }
    return {**VIT, "args": {**VIT["args"], **settings}}


def train(
    options: argparse.Namespace, arm: str, seed: int, steps: int, name: str, first: int
) -> dict[str, Any]:
    """Train a student on stored answers; return its test accuracy and what it took."""
    settings = {**plain("cifar10"), "student": student(arm, first)}
    keys = [key for key in KEYS if not key.startswith(NOT_HERE)]
    keys_of_options = ["teacher.cache.views=4", "run.every.log=1"]
    run = [
        f"run.folder={options.work}",
        f"run.name={name}",
        f"run.seed={seed}",
        f"run.steps={steps}",
    ]
    loaded = kd.load_config(
        settings, [*keys, *keys_of_options, *run, *options.overrides]
    )
    cache(loaded)  # before the clock: what is stored is left as it is
    start = time.process_time()
    folder = kd.train(loaded).folder
    minutes = (time.process_time() - start) / 60
    rows = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    times = [row["step_ms"] for row in rows if row["kind"] == "train"]
    scored = json.loads((folder / "scored.json").read_text())
    accuracy = scored["row"]["accuracy"]
    percents = [
        round(100 * value, 2)
        for value in (accuracy, *wilson_interval(accuracy, scored["images"]))
    ]
    row = {
        "arm": arm,
        "seed": seed,
        "steps": steps,
        **dict(zip(("accuracy", "low", "high"), percents, strict=True)),
    }
    return {
        **row,
        "ms_a_step": round(statistics.median(times[len(times) // 4 :]), 2),
        "cpu_minutes": round(minutes, 2),
    }


def main() -> None:
    """Time the arms, train what is missing, write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs", "tokens"))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("overrides", nargs="*", help="key=value for all")
    options = parser.parse_intermixed_args()
    options.work.mkdir(parents=True, exist_ok=True)
    weights = [
        text.partition("=")[2]
        for text in options.overrides
        if text.startswith("teacher.checkpoint=")
    ]
    if not weights:
        parser.error("teacher.checkpoint=FILE is missing")
    options.teachers = [Path(weights[-1]).parent]
    identity = {"teacher": full_labels.digest(options.teachers), "commit": commit()}
    timed = options.work / "timed.json"
    if not timed.is_file():
        durations: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for turn in range(SIZES["rounds"]):
            for arm, times in durations.items():
                name = f"timed-{list(ARMS).index(arm)}-{turn}"
                times.append(
                    train(
                        options,
                        arm,
                        options.seeds[0],
                        SIZES["steps"],
                        name,
                        SIZES["steps"],
                    )["ms_a_step"]
                )
        timed.write_text(
            json.dumps(
                {arm: statistics.median(times) for arm, times in durations.items()}
            )
        )
    ms = json.loads(timed.read_text())
    print(ms, flush=True)
    finished = {
        (row["arm"], row["seed"]) for row in full_labels.earlier(options, THEME)
    }
    all_steps = options.epochs * IMAGES // 64
    for seed in options.seeds:
        for arm in options.arms:
            if (arm, seed) in finished:
                continue
            share = (
                FIRST if "small" in ARMS[arm] else 1.0
            )  # of the steps that are shorter
            steps = round(all_steps / (share * ms[arm] / ms["all patches"] + 1 - share))
            name = f"tokens-{list(ARMS).index(arm)}-{seed}"
            row = {
                **train(options, arm, seed, steps, name, round(FIRST * steps)),
                **identity,
            }
            with (options.work / f"{THEME}.jsonl").open("a") as opened:
                opened.write(json.dumps(row) + "\n")
            print(row, flush=True)
    rows = sorted(
        full_labels.earlier(options, THEME),
        key=lambda row: (row["seed"], list(ARMS).index(row["arm"])),
    )
    write(THEME, printable(["python benchmarks/tokens.py", *sys.argv[1:]]), rows)


if __name__ == "__main__":
    main()
