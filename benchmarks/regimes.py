"""When sifting pays: sifters against fewer epochs and random subsets, on several kinds
of data, at equal images seen.

Run: python benchmarks/regimes.py --work FOLDER [--regimes both redundant ...] [--seeds 0 1 2] [--epochs 24]

food_mini, balanced validation split, one teacher that was fitted on the even pictures,
its answers cached ahead. A row that is in FOLDER/rows.csv is not made again, so the
study can be stopped and goes on. One thread, last evaluation.

- redundant, each plate once: the redundant pictures without their near-duplicates, and
  the same number of images.
- mislabelled: a fifth of the labels is wrong, and the labels are half of the loss (`kl`
  and `ce`).
- pretrained: the student was trained on six dishes with labels; it is distilled on the
  six others.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from _record import write
from kd import config
from kd.core.text import markdown_table
from kd.deploy.export.export import ExportOptions, export
from kd.files.run_dir import RunDir
from kd.jobs.fill_cache import cache
from kd.jobs.train import teach, train
from kd.setup.data import open_sources
from kd.setup.recipe import resolve
from kd.setup.student import best_student

REGIMES = {
    "both": {"train_images": 410, "imbalance": 30, "redundancy": 4},
    "redundant": {"train_images": 126, "redundancy": 2},
    "long-tailed": {"train_images": 410, "imbalance": 30},
    "even": {"train_images": 125},
    "redundant, each plate once": {"train_images": 63},
    "mislabelled": {"train_images": 125, "label_noise": 0.2},
    "pretrained": {"train_images": 250},
}
"""About 1,500 training images each; with redundancy, half of them are different
plates.
"""
FITTED: dict[str, Any] = {"train_images": 250}
"""The images that the teacher is fitted on: even, whatever the regime."""
PLATES = {"redundant, each plate once": 2}
"""How many times the epochs of a regime of so many times fewer images, for as many
steps.
"""
VIEWS = 6
HISTORY = ("sifter.kind=history", "sifter.keep=0.4")
RANDOM = (
    "sifter.kind=random",
    "sifter.keep=0.4",
)
ARMS: dict[str, tuple[str, ...]] = {
    "everything": (),
    "history": HISTORY,
    "random": RANDOM,
    "random, classes balanced throughout": ("data.balance=0.4",),
    "random, classes balanced throughout, keep 0.25": ("data.balance=0.25",),
}
"""The last two are bit by bit what the sifter `random` with `balance` drew until commit
17adf1c. Rows named "random, classes balanced" are of that sifter with whole epochs at
start and end, which `data.balance` does not have.
"""
PLAN = [
    ("everything", 1.0),
    ("everything", 0.6),
    ("history", 0.6),
    ("random", 0.6),
    ("history", 1.0),
    ("everything", 0.4),
    ("random, classes balanced throughout", 0.6),
    ("random, classes balanced throughout, keep 0.25", 0.6),
    ("everything", 2.0),
    ("random, classes balanced throughout", 1.2),
    ("random, classes balanced throughout, keep 0.25", 1.2),
]
"""Arm, and its budget: images trained, as a share of `--epochs` passes over
everything.
"""
KEEP = 0.4
ANNEAL = 0.125


def settings(work: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration that all runs share."""
    kernels = {"attention": "unfused", "compile": "off"}
    model = "xcit_nano_12_p16_224"
    heads = {"num_heads": 4, "cls_attn_layers": 1}
    return {
        "run": {"folder": str(work / "runs"), "every": {"log": 100, "evaluate": 10**6}},
        "data": {
            "kind": "food_mini",
            "root": str(work / "food_mini"),
            "image_size": 64,
            "batch_size": 32,
            "eval_batch": 200,
            "workers": 0,
            "store": "ram",
            "augment": {"crop_scale": 0.35, "jitter": 0.2},
            **options,
        },
        "teacher": {
            "model": model,
            "args": {"embed_dim": 128, "depth": 3, **heads},
            "precision": "fp32",
            "runtime": "torch",
            "min_accuracy": 0,
            **kernels,
            "fit": {
                "epochs": 12,
                "lr": 1.5e-3,
                "warmup_ratio": 0.1,
                "evaluate": 10**6,
                "folder": str(work / "teachers"),
            },
        },
        "student": {
            "model": model,
            "args": {"embed_dim": 64, "depth": 2, **heads},
            **kernels,
        },
        "losses": [{"kind": "kl", "temperature": 2.0}],
        "optimizer": {"lr": 3e-3, "warmup_ratio": 0.1},
        "backend": {"kind": "cpu", "precision": "fp32", "threads": 1},
    }


def base_of(work: Path, regime: str) -> dict[str, Any]:
    """Return the configuration of a regime, its teacher fitted."""
    base = settings(work, REGIMES[regime])
    if regime == "mislabelled":
        base["losses"].append({"kind": "ce"})
    if regime == "pretrained":
        base = on_other_dishes(work, base)
        fitted = teach(config.load(base))[0]
    else:
        fitted = teach(config.load(settings(work, FITTED)))[0]
    base["teacher"] |= {
        "model": str(fitted),
        "args": {},
        "fit": {},
        "cache": {"views": VIEWS},
    }
    return base


def on_other_dishes(work: Path, base: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration for the last six dishes, whose student was trained on the
    first six.
    """
    pictures = open_sources(resolve(config.load(base)).data).train
    pictures.prepare()
    folder = Path(base["data"]["root"]) / Path(pictures.name(0)).parts[0]
    common = {
        k: v
        for k, v in base["data"].items()
        if k not in ("kind", "root", "train_images")
    }
    halves: list[dict[str, Any]] = []
    for half, dishes in enumerate((pictures.classes[:6], pictures.classes[6:])):
        root = work / f"dishes-{half}"
        for split in ("train", "val"):
            (root / split).mkdir(parents=True, exist_ok=True)
            for dish in dishes:
                if not (root / split / dish).is_symlink():
                    (root / split / dish).symlink_to((folder / split / dish).resolve())
        halves.append({**common, "kind": "imagefolder", "root": str(root)})
    first = {k: v for k, v in base.items() if k != "teacher"} | {
        "data": halves[0],
        "losses": [{"kind": "ce"}],
    }
    trained_first = train(
        config.load(first, ["run.epochs=24", "run.name=first-dishes"])
    ).folder
    start = export(trained_first, options=ExportOptions(onnx=False)).folder
    return {
        **base,
        "data": halves[1],
        "student": {**base["student"], "init": "pretrained", "checkpoint": str(start)},
    }


def epochs_of(share: float, epochs: int, arm: str) -> int:
    """Return how many epochs of a sifter take `share` of the images of so many epochs
    of everything.
    """
    return next(n for n in range(1, 10**6) if trained(n, arm) >= share * epochs)


def trained(epochs: int, arm: str) -> float:
    """Return the images that so many epochs of a sifter train, in whole epochs: the
    first and the last are whole.
    """
    throughout = any(key.startswith("data.balance=") for key in ARMS[arm])
    unsifted = (
        sum(epoch == 0 or epoch / epochs >= 1 - ANNEAL for epoch in range(epochs))
        if not throughout
        else 0
    )
    keep = 0.25 if "data.balance=0.25" in ARMS[arm] else KEEP
    return unsifted + keep * (epochs - unsifted)


def per_class(folder: Path, loaded: config.Config) -> list[float]:
    """Return the accuracy of each class on the validation split, percent."""
    recipe = resolve(loaded)
    data = open_sources(recipe.data)
    student = best_student(RunDir(folder), recipe, data.classes)[0].eval()
    views = data.views()[1]
    hits: dict[int, list[bool]] = {}
    for start in range(0, len(data.val), 100):
        samples = [
            views.load(id, 0) for id in range(start, min(start + 100, len(data.val)))
        ]
        with torch.no_grad():
            answers = student(
                torch.stack([sample.pixels for sample in samples])
            ).logits.argmax(-1)
        for sample, answer in zip(samples, answers.tolist(), strict=True):
            hits.setdefault(int(sample.label), []).append(answer == sample.label)
    return [100 * statistics.mean(hits[label]) for label in sorted(hits)]


def run_one(
    base: dict[str, Any], regime: str, arm: str, share: float, seed: int, epochs: int
) -> dict[str, Any]:
    """Train one arm with one seed and return its row; `share` of the images of so many
    epochs of everything.
    """
    images = len(open_sources(resolve(config.load(base)).data).train)
    steps = round(
        share * epochs * PLATES.get(regime, 1) * (images // base["data"]["batch_size"])
    )
    name = f"{regime}-{arm}-{share:g}-{seed}".replace(" ", "_").replace(",", "")
    length = (
        [f"run.epochs={epochs_of(share, epochs, arm)}"]
        if ARMS[arm]
        else [f"run.steps={steps}"]
    )
    loaded = config.load(
        base, [*ARMS[arm], *length, f"run.seed={seed}", f"run.name={name}"]
    )
    clock = time.perf_counter()
    cpu = time.process_time()
    result = train(loaded)
    wall = time.perf_counter() - clock
    cpu = time.process_time() - cpu
    rows = [
        json.loads(line)
        for line in (result.folder / "metrics.jsonl").read_text().splitlines()
    ]
    last = [row for row in rows if row["kind"] == "val"][-1]
    classes = per_class(result.folder, loaded)
    third = len(classes) // 3
    return {
        "regime": regime,
        "arm": arm,
        "budget": share,
        "seed": seed,
        "accuracy": round(100 * last["accuracy"], 2),
        "agreement": round(100 * last["agreement"], 2),
        "teacher_accuracy": round(100 * last["teacher_accuracy"], 2),
        "accuracy_largest_third": round(statistics.mean(classes[:third]), 2),
        "accuracy_smallest_third": round(statistics.mean(classes[-third:]), 2),
        "images_of_an_epoch": images,
        "images_trained": last["images"],
        "training_seconds": round(last["seconds"], 2),
        "job_seconds": round(wall, 2),
        "job_cpu_seconds": round(cpu, 2),
        "per_class": " ".join(f"{value:.0f}" for value in classes),
    }


def earlier(file: Path) -> list[dict[str, Any]]:
    """Return the rows that are made already; numbers as numbers."""
    if not file.exists():
        return []
    words = ("regime", "arm", "per_class", "loss", "setting")
    with file.open() as opened:
        return [
            {k: v if k in words else float(v) for k, v in row.items()}
            for row in csv.DictReader(opened)
        ]


def append(file: Path, row: dict[str, Any]) -> None:
    """Add a row to the CSV of this study."""
    new = not file.exists()
    with file.open("a", newline="") as opened:
        writer = csv.DictWriter(opened, fieldnames=list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return means with 95 % intervals, and differences from everything with the same
    seed, as Markdown.
    """
    lines = []
    undivided = {
        (r["regime"], r["budget"], r["seed"]): r
        for r in rows
        if r["arm"] == "everything"
    }
    for regime, budget, arm in dict.fromkeys(
        (r["regime"], r["budget"], r["arm"]) for r in rows
    ):
        of_arm = [
            r
            for r in rows
            if (r["regime"], r["arm"], r["budget"]) == (regime, arm, budget)
        ]
        same = [
            (r, undivided[regime, budget, r["seed"]])
            for r in of_arm
            if (regime, budget, r["seed"]) in undivided
        ]
        full = [
            (r, undivided[regime, 1.0, r["seed"]])
            for r in of_arm
            if (regime, 1.0, r["seed"]) in undivided
        ]
        lines.append(
            {
                "data": regime,
                "images": f"{100 * budget:.0f} %",
                "method": arm,
                "accuracy": interval([r["accuracy"] for r in of_arm], "{:.1f}"),
                "against everything, as many images": (
                    difference(same) if arm != "everything" else ""
                ),
                "against everything, 100 %": (
                    difference(full) if (arm, budget) != ("everything", 1.0) else ""
                ),
                "largest third": (
                    f"{statistics.mean(r['accuracy_largest_third'] for r in of_arm):.1f}"
                ),
                "smallest third": (
                    f"{statistics.mean(r['accuracy_smallest_third'] for r in of_arm):.1f}"
                ),
                "CPU seconds": (
                    f"{statistics.mean(r['job_cpu_seconds'] for r in of_arm):.0f}"
                ),
                "seeds": str(len(of_arm)),
            }
        )
    return markdown_table(lines)


def difference(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Return the difference of accuracy within pairs of the same seed, in points."""
    gains = [mine["accuracy"] - theirs["accuracy"] for mine, theirs in pairs]
    return interval(gains, "{:+.1f}") if pairs else ""


T95 = (0, 0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)
"""Student's t for a two-sided 95 % interval of a mean of so many values."""


def interval(values: Sequence[float], form: str) -> str:
    """Return mean +- half of a 95 % interval."""
    mean = form.format(statistics.mean(values))
    if len(values) < 2:
        return mean
    return (
        f"{mean} ±"
        f" {T95[min(len(values), 9)] * statistics.stdev(values) / len(values) ** 0.5:.1f}"
    )


def main() -> None:
    """Run what is missing, and write the CSV and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", required=True)
    parser.add_argument(
        "--regimes", nargs="*", default=list(REGIMES), choices=list(REGIMES)
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--budgets", nargs="*", type=float, default=[1.0, 0.6, 0.4])
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--name", default="regimes", help="of the CSV")
    parser.add_argument(
        "--write", action="store_true", help="write the CSV with what is there"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = Path(options.work)
    rows = []
    file = work / "rows.csv"
    if not options.write:
        for regime in options.regimes:
            base = base_of(work, regime)
            for seed in options.seeds:
                cache(config.load(base, [f"run.seed={seed}"]))
                for arm, share in PLAN:
                    finished = {
                        (r["regime"], r["arm"], r["budget"], r["seed"])
                        for r in earlier(file)
                    }
                    chosen = arm in options.arms and share in options.budgets
                    if chosen and (regime, arm, share, seed) not in finished:
                        append(
                            file,
                            run_one(base, regime, arm, share, seed, options.epochs),
                        )
    rows = sorted(
        earlier(file),
        key=lambda r: (
            list(REGIMES).index(r["regime"]),
            -r["budget"],
            list(ARMS).index(r["arm"]),
            r["seed"],
        ),
    )
    print(summary(rows))
    command = f"python benchmarks/regimes.py --work FOLDER --epochs {options.epochs}"
    write(options.name, command, rows, None if options.write else work)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
