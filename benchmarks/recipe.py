"""What the tricks of airbench (arXiv:2404.00498) and muon add to kd's recipe for small
pictures, each alone.

Run: python benchmarks/recipe.py --data FOLDER [--seeds 0 1 2] [--arms shift muon] [--epochs 8] [--work FOLDER]

FOLDER holds train/<class>/ of CIFAR-10. The student of configs/few_labels.yaml (0.41 M
parameters) learns the labels of 40,000 training pictures; accuracy is of 10,000 others
of that split. `base` has kd's own crops, erasing, parameter groups and schedule; an arm
changes one thing. The loop is this file's: pictures lie decoded in memory, one thread,
bfloat16. Seeds are paired: the same weights and order in all arms. A row is added to
WORK/recipe.jsonl when its run has ended, and is not made again; a new work folder
begins with the committed rows of this hardware.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from PIL import Image
from sifting import T95
from timm.optim.muon import Muon
from torch import Tensor, nn
from torch.nn import functional

from _record import commit, newest, write
from examples.residual import network
from kd.core.text import markdown_table
from kd.data.views import cut, erase, random_box
from kd.engine.optim import Schedule, groups

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
BATCH = 256
SIDE = 32
MEAN = (0.491, 0.482, 0.447)
STD = (0.247, 0.243, 0.262)
ARMS: dict[str, Row] = {
    "base": {},
    "shift": {"crop": "shift"},
    "alternate": {"flip": "alternate"},
    "shift and alternate": {"crop": "shift", "flip": "alternate"},
    "linear": {"schedule": "linear"},
    "clip 0": {"clip": 0.0},
    "muon, lr 0.005": {"optimizer": "muon", "lr": 5e-3},
    "muon, lr 0.01": {"optimizer": "muon", "lr": 1e-2},
    "muon, lr 0.02, clip 0": {"optimizer": "muon", "lr": 2e-2, "clip": 0.0},
    "all": {
        "crop": "shift",
        "flip": "alternate",
        "schedule": "linear",
        "optimizer": "muon",
        "lr": 1e-2,
    },
}
"""What each arm changes. `alternate`: every second epoch shows a picture mirrored."""


def read(folder: Path) -> tuple[np.ndarray, Tensor]:
    """Return pictures [N, 32, 32, 3] and labels, in an order that mixes the classes."""
    classes = sorted(path.name for path in folder.iterdir())
    files = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).iterdir())
    ]
    random.Random(0).shuffle(files)
    pixels = np.stack(
        [np.asarray(Image.open(path).convert("RGB")) for path, _ in files]
    )
    return pixels, torch.tensor([label for _, label in files])


def view(pixels: np.ndarray, arm: Row, flipped: bool, rng: random.Random) -> np.ndarray:
    """Return one training view [32, 32, 3]."""
    if arm.get("crop") == "shift":
        padded = np.pad(pixels, ((2, 2), (2, 2), (0, 0)), mode="reflect")
        row = rng.randrange(5)
        column = rng.randrange(5)
        image = Image.fromarray(padded[row : row + SIDE, column : column + SIDE])
    else:
        image = cut(Image.fromarray(pixels), random_box(SIDE, SIDE, 0.75, rng), SIDE)
    image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flipped else image
    return np.asarray(erase(image, rng) if rng.random() < 0.3 else image)


def normalized(pixels: np.ndarray) -> Tensor:
    """Return network input [B, 3, 32, 32] of pictures [B, 32, 32, 3]."""
    planes = torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2)
    return (planes / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(
        3, 1, 1
    )


def optimizer_of(student: nn.Module, arm: Row) -> torch.optim.Optimizer:
    """Return AdamW as kd makes it, or timm's muon, which leaves vectors to AdamW."""
    if arm.get("optimizer") != "muon":
        return torch.optim.AdamW(groups([student], 0.1), lr=5e-3, fused=True)
    return Muon(groups([student], 0.1), lr=arm["lr"], betas=(0.9, 0.999), nesterov=True)


def run_one(data: tuple[np.ndarray, Tensor], name: str, seed: int, epochs: int) -> Row:
    """Train one student and return its row."""
    arm = ARMS[name]
    pixels, labels = data
    held_out = len(labels) // 5
    torch.manual_seed(seed)
    student = network(16).to(memory_format=torch.channels_last)
    optimizer = optimizer_of(student, arm)
    peaks = [group["lr"] for group in optimizer.param_groups]
    schedule = Schedule(1.0, 0.05, 0.0)
    rng = random.Random(seed)
    steps = epochs * ((len(labels) - held_out) // BATCH)
    steps_done = 0
    begin = time.process_time()
    first = [rng.random() < 0.5 for _ in labels]
    shape: Callable[[float], float] = schedule.factor
    if arm.get("schedule") == "linear":
        shape = lambda progress: min(progress / 0.05, (1 - progress) / 0.95)  # noqa: E731
    for epoch in range(epochs):
        order = [
            held_out + place
            for place in np.random.default_rng([seed, epoch]).permutation(
                len(labels) - held_out
            )
        ]
        for start in range(0, len(order) - BATCH + 1, BATCH):
            ids = order[start : start + BATCH]
            alternate = arm.get("flip") == "alternate"
            flips = [
                (first[i] + epoch) % 2 == 1 if alternate else rng.random() < 0.5
                for i in ids
            ]
            batch = np.stack(
                [
                    view(pixels[i], arm, flip, rng)
                    for i, flip in zip(ids, flips, strict=True)
                ]
            )
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * shape(steps_done / steps)
            with torch.autocast("cpu", torch.bfloat16):
                logits = student(
                    normalized(batch).contiguous(memory_format=torch.channels_last)
                )
            functional.cross_entropy(
                logits.float(), labels[ids], label_smoothing=0.1
            ).backward()
            if clip := arm.get("clip", 1.0):
                nn.utils.clip_grad_norm_(student.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            steps_done += 1
    seconds = time.process_time() - begin
    student.eval()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        predictions = [
            student(normalized(pixels[i : min(held_out, i + 500)])).argmax(1)
            for i in range(0, held_out, 500)
        ]
    right = (torch.cat(predictions) == labels[:held_out]).float().mean().item()
    row = {
        "arm": name,
        "epochs": epochs,
        "seed": seed,
        "accuracy": round(100 * right, 2),
    }
    return {**row, "cpu_seconds": round(seconds, 1), "commit": commit()}


def report(rows: Sequence[Row]) -> str:
    """Return a table: each arm against `base`, paired by seed."""
    table = []
    for epochs in dict.fromkeys(row["epochs"] for row in rows):
        some = [row for row in rows if row["epochs"] == epochs]
        base = {row["seed"]: row for row in some if row["arm"] == "base"}
        for arm in dict.fromkeys(row["arm"] for row in some):
            of_arm = [row for row in some if row["arm"] == arm and row["seed"] in base]
            gaps = [row["accuracy"] - base[row["seed"]]["accuracy"] for row in of_arm]
            around = (
                f" ± {T95[len(gaps)] * statistics.stdev(gaps) / math.sqrt(len(gaps)):.2f}"
                if gaps[1:]
                else ""
            )
            times = statistics.mean(
                row["cpu_seconds"] / base[row["seed"]]["cpu_seconds"] for row in of_arm
            )
            mean = statistics.mean(row["accuracy"] for row in of_arm)
            cells = {
                "arm": arm,
                "epochs": epochs,
                "seeds": len(of_arm),
                "accuracy": f"{mean:.2f} %",
            }
            table.append(
                {
                    **cells,
                    "against base": f"{statistics.mean(gaps):+.2f}{around}",
                    "CPU time": f"{times:.2f}",
                }
            )
    return markdown_table(table)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the runs that are missing, a seed after the other; print the table and write
    the CSV.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "recipe")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.work / "recipe.jsonl"
    if not file.is_file():
        file.write_text("".join(json.dumps(row) + "\n" for row in newest("recipe")[1]))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    finished = {(row["arm"], row["epochs"], row["seed"]) for row in rows}
    data = read(options.data / "train")
    for seed in options.seeds:
        for arm in options.arms:
            if (arm, options.epochs, seed) not in finished:
                rows.append(run_one(data, arm, seed, options.epochs))
                with file.open("a") as opened:
                    opened.write(json.dumps(rows[-1]) + "\n")
                print(rows[-1], flush=True)
    print(report(rows))
    write("recipe", "python benchmarks/recipe.py --data FOLDER", rows)


if __name__ == "__main__":
    main()
