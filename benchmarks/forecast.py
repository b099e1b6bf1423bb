"""What `kd-train CONFIG --check` says before five small runs, and what comes: time,
memory, steps, sifting.

Run: python benchmarks/forecast.py [--runs history relative] [--work FOLDER] [--kd FOLDER --label NAME]

Each run is checked and at once trained, in processes of their own; teachers are fitted
once and shared. What came is counted here, from the rows of the run folder and the
system's count of the largest resident memory. `--kd`: a checkout of another commit,
whose rows get another label.
On a machine with other work the time of both moves with it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from _record import newest, write

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
TINY: dict[str, Any] = {
    "run": {"epochs": 8, "every": {"log": 10}},
    "data": {
        "kind": "imagefolder",
        "image_size": 32,
        "batch_size": 16,
        "workers": 0,
        "store": "ram",
    },
    "teacher": {
        "model": "vit_tiny_patch16_224",
        "args": {"patch_size": 4, "embed_dim": 96, "depth": 6, "num_heads": 3},
    },
    "student": {
        "model": "vit_tiny_patch16_224",
        "args": {"patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 3},
    },
    "losses": [{"kind": "kl"}],
    "backend": {"kind": "cpu", "threads": 1},
}
"""A teacher and a student of which a step takes some hundredths of a second on one
thread.
"""
FIT = "teacher.fit.epochs=3"
STORED = "teacher.cache.views=1"
RUNS: dict[str, list[str]] = {
    "baseline": [FIT, "run.epochs=4", "run.baseline=true"],
    "averaged": [FIT, STORED, "optimizer.ema_decay=0.99", "data.test_fraction=0.5"],
    "several labels": [
        FIT,
        "run.epochs=4",
        "losses=[{kind: binary_kl}]",
        "data.kind=multilabel",
    ],
    "history": [FIT, STORED, "run.epochs=12", "sifter.kind=history"],
    "relative": [
        FIT,
        STORED,
        "run.epochs=12",
        "sifter.kind=relative",
        "sifter.sift_delay=112",
    ],
}
IMAGES = {"train": 300, "val": 60}  # of each of three classes


def paint(root: Path) -> Path:
    """Write noisy pictures of three colours, and their labels as sets, once."""
    if (root / "val.csv").exists():
        return root
    draw = np.random.default_rng(0)
    for split, count in IMAGES.items():
        lines = []
        for channel, name in enumerate(("red", "green", "blue")):
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = draw.integers(0, 200, (40, 40, 3), np.uint8)
                pixels[..., channel] += np.uint8(draw.integers(0, 55))
                Image.fromarray(pixels).save(
                    root / split / name / f"{number:03d}.jpg", quality=90
                )
                lines.append(f"{split}/{name}/{number:03d}.jpg,{name}")
        (root / f"{split}.csv").write_text("\n".join(["file,labels", *lines, ""]))
    return root


def seconds(text: str) -> float:
    """Read what `kd` writes as 42 s, 4 min 42 s, 3 h 05 min."""
    return sum(
        float(count) * {"h": 3600, "min": 60, "s": 1}[unit]
        for count, unit in re.findall(r"([\d.]+) (h|min|s)\b", text)
    )


def forecast(text: str) -> Row:
    """Read the output of --check."""
    predicted = {
        name: float(match[1])
        for name, pattern in PATTERNS.items()
        if (match := re.search(pattern, text))
    }
    return predicted | {
        "seconds": seconds(text.partition("time      about ")[2].partition(":")[0])
    }


PATTERNS = {
    "memory MiB": r"memory    (\d+) MiB",
    "steps": r"length    (\d+) steps",
    "sifting saves %": r"saves ([\d.]+) % of a ",
}


def came(folder: Path, peak_kib: int) -> Row:
    """Count what came, from the files of a run; its teacher's fit and baseline are part
    of time and memory.
    """
    rows = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    train, epochs = (
        [row for row in rows if row["kind"] == kind] for kind in ("train", "epoch")
    )
    measured = {"steps": train[-1]["step"], "memory MiB": peak_kib / 1024}
    measured["seconds"] = json.loads((folder / "manifest.json").read_text())[
        "billable_seconds"
    ]
    ends = [0.0, *(row["seconds"] for row in epochs)]
    took = [end - begin for begin, end in itertools.pairwise(ends)]
    full = max(row["trained"] for row in epochs)
    warm: dict[bool, list[float]] = {True: [], False: []}
    for time, begin, row in zip(took[1:], epochs, epochs[1:], strict=False):
        teacher_images = sum(
            step_row["teacher_images"]
            for step_row in train
            if begin["step"] < step_row["step"] <= row["step"]
        )
        if teacher_images < row["trained"] / 20:
            warm[row["trained"] == full].append(time)
    if warm[True] and warm[False]:
        measured["sifting saves %"] = 100 * (
            1 - statistics.median(warm[False]) / statistics.median(warm[True])
        )
    return measured


def kd(place: Path, *argv: str, log: Path) -> tuple[str, int]:
    """Run a command of a checkout; return its output, and the peak of its resident
    memory in KiB.
    """
    environment = {**os.environ, "PYTHONPATH": str(place)}
    code = (
        f"import sys; from kd.cli.__main__ import main; sys.exit(main({list(argv)!r}))"
    )
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=place,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
    text = log.read_text()
    if status:
        raise SystemExit(f"{' '.join(argv)} ended with {status}:\n{text[-2000:]}")
    return text, usage.ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", default=[*RUNS], choices=[*RUNS])
    parser.add_argument("--work", type=Path, default=Path("/tmp/kd-forecast"))
    parser.add_argument("--kd", type=Path, default=ROOT)
    parser.add_argument("--label", default="now")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    config = args.work / "tiny.yaml"
    pictures = paint(args.work / "pictures")
    config.write_text(yaml.safe_dump(TINY))
    rows = [
        row
        for row in newest("forecast")[1]
        if row["code"] != args.label or row["run"] not in args.runs
    ]
    for name in args.runs:
        folder = args.work / args.label / name.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        keys = [*RUNS[name], f"run.name={folder.name}", f"run.folder={folder.parent}"]
        keys += [
            f"data.root={pictures}",
            f"teacher.fit.folder={folder.parent}/teachers",
        ]
        if "data.kind=multilabel" in keys:
            keys += ["data.train_labels=train.csv", "data.val_labels=val.csv"]
        text, _ = kd(
            args.kd,
            "train",
            str(config),
            *keys,
            "--check",
            log=folder.with_suffix(".check"),
        )
        _, peak = kd(
            args.kd, "train", str(config), *keys, log=folder.with_suffix(".log")
        )
        expected = forecast(text)
        measured = came(folder, peak)
        for quantity, value in measured.items():
            error: float | str = ""
            if quantity in expected and value:
                error = 100 * (expected[quantity] / value - 1)
                if quantity == "sifting saves %":  # of the time that is left
                    error = 100 * ((100 - expected[quantity]) / (100 - value) - 1)
            cells = {
                "told": expected.get(quantity, "nothing"),
                "came": round(value, 2),
                "error_percent": error if isinstance(error, str) else round(error, 1),
            }
            rows.append({"code": args.label, "run": name, "what": quantity, **cells})
            print(rows[-1], flush=True)
    write("forecast", f"python {' '.join(sys.argv)}", rows)


if __name__ == "__main__":
    main()
