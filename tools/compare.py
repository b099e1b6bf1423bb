"""kd against timm's own train.py: accuracy against wall-clock, same teacher, student, data, augmentation and schedule.

Run: make compare TIMM=FOLDER          (FOLDER: a checkout of pytorch-image-models)
     python tools/compare.py --timm FOLDER [--config FILE] [--seeds 0 1 2] [--threads 1]
     [key=value ...]

The configuration is kd's; timm's flags are made of it. Its data must lie as
train/<class>/ and val/<class>/. The teacher is fitted once by kd and exported, and both
load that folder. Runs are made in turns, each in a process of its own, and both
evaluate after every epoch. A curve counts the seconds of training alone; the job's
seconds, CPU seconds and peak memory are those of the whole process. A run that `--work`
holds already is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from timm_distillation import Finished, finished, train_with_timm  # noqa: E402

from _record import write  # noqa: E402
from kd import config  # noqa: E402
from kd.core.intervals import wilson_interval  # noqa: E402
from kd.core.text import markdown_table  # noqa: E402
from kd.jobs.train import teach  # noqa: E402
from kd.setup.data import open_sources  # noqa: E402
from kd.setup.recipe import resolve  # noqa: E402
from kd.study.report.charts import FILE, Axis, Series, lines  # noqa: E402

Row = dict[str, Any]
ARMS: dict[str, tuple[str, ...]] = {
    "kd, teacher each step": (),
    "kd, cache of 4 views": ("teacher.cache.views=4",),
    "kd, cache of 2 views": ("teacher.cache.views=2",),
    "kd, cache of 1 view": ("teacher.cache.views=1",),
}
"""The cache is empty at the start and fills as the run goes, so that its cost is inside
the measured time.
"""
COLORS = ("#d9822b", "#2f6fde", "#2c8a5b", "#8a4fb8", "#c2344d")


def has_size(model: str) -> bool:
    """Return whether a timm model is made for one image size, which kd sets itself."""
    return hasattr(getattr(timm.create_model(model), "patch_embed", None), "img_size")


def timm_flags(settings: config.Config, classes: int, seed: int) -> Row:
    """Return the flags of timm's train.py that mean what the configuration says."""
    run = settings.run
    data = settings.data
    optimizer = settings.optimizer
    student = settings.student
    size = data.image_size
    warmup = int(run.epochs) * optimizer.warmup_ratio
    if warmup != round(warmup):
        raise SystemExit(
            "timm warms up in whole epochs: choose run.epochs so that"
            " optimizer.warmup_ratio of them is whole"
        )
    flags: Row = {
        "model": student.model,
        "num-classes": classes,
        "img-size": size,
        "seed": seed,
    }
    arguments = {**student.args}
    if has_size(student.model):
        arguments["img_size"] = size
    if arguments:
        flags["model-kwargs"] = [f"{key}={value}" for key, value in arguments.items()]
    flags |= {
        "batch-size": data.batch_size,
        "validation-batch-size": data.eval_batch or data.batch_size,
    }
    flags |= {"epochs": run.epochs, "warmup-epochs": round(warmup), "lr": optimizer.lr}
    flags |= {
        "weight-decay": optimizer.weight_decay,
        "clip-grad": optimizer.clip_grad_norm,
        "workers": data.workers,
    }
    flags |= {
        "scale": [data.augment.crop_scale, 1.0],
        "hflip": data.augment.flip,
        "color-jitter": data.augment.jitter,
    }
    flags |= {
        "train-interpolation": "bilinear",
        "interpolation": "bilinear",
        "crop-pct": data.crop_pct,
    }
    flags |= {
        "val-split": getattr(data.options, "val_split", "val"),
        "log-interval": 10**6,
        "sched-on-updates": True,
    }
    return {**flags, "kd-temperature": settings.losses[0].options.temperature}


def curve_of_timm(job: Finished) -> list[Row]:
    """Return accuracy and seconds of training after each epoch, as timm printed them."""
    rows: list[Row] = []
    seconds = 0.0
    for _, line in job.lines:
        train = re.search(
            r"Train: (\d+) \[\s*\d+/(\d+) \(100%\)\].*?/s\s+\(([\d.]+)s,", line
        )
        test = re.search(
            r"Test: \[\s*(\d+)/(\d+)\].*Acc@1:\s+[\d.]+ \(\s*([\d.]+)\)", line
        )
        if train:
            seconds += int(train[2]) * float(train[3])
            rows.append(
                {"epoch": int(train[1]) + 1, "training_seconds": round(seconds, 2)}
            )
        elif test and test[1] == test[2]:
            rows[-1]["accuracy"] = float(test[3])
    return rows


def curve_of_kd(folder: Path) -> list[Row]:
    """Return accuracy and seconds of training after each evaluation."""
    rows = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    evaluations = [row for row in rows if row["kind"] == "val" and row["step"]]
    return [
        {
            "epoch": number,
            "training_seconds": round(row["seconds"], 2),
            "accuracy": round(100 * row["accuracy"], 3),
        }
        for number, row in enumerate(evaluations, 1)
    ]


def train_student(
    arm: str,
    seed: int,
    args: argparse.Namespace,
    settings: Row,
    sizes: tuple[int, int],
) -> list[Row]:
    """Train one student in its own process; return its curve, with the job's cost.

    `sizes` are the numbers of classes and of validation images.
    """
    classes, images = sizes
    name = re.sub(r"\W+", "_", arm) + f"-{seed}"
    if arm == "timm":
        flags = timm_flags(config.load(settings), classes, seed)
        data = Path(settings["data"]["root"])
        teacher = Path(settings["teacher"]["model"])
        job = train_with_timm(args.timm, data, teacher, flags, args.work / name)
        rows = curve_of_timm(job)
    else:
        file = args.work / f"{name}.yaml"
        folder = args.work / name
        file.write_text(yaml.safe_dump(settings))
        argv = [
            sys.executable,
            "-m",
            "kd.cli",
            "train",
            str(file),
            f"run.seed={seed}",
            f"run.folder={folder}",
        ]
        job = finished([*argv, "run.name=run", *ARMS[arm]])
        rows = curve_of_kd(folder / "run")
    job_columns = {
        "val_images": images,
        "job_seconds": round(job.seconds, 1),
        "job_cpu_seconds": round(job.cpu_seconds, 1),
        "peak_mib": round(job.peak_mib, 1),
    }
    return [{"arm": arm, "seed": seed, **row, **job_columns} for row in rows]


def prepare(args: argparse.Namespace) -> tuple[Row, tuple[int, int]]:
    """Fit the teacher; return all runs' configuration, and the `sizes` of the data."""
    pins = [
        "run.baseline=false",
        f"run.folder={args.work / 'teacher'}",
        f"teacher.fit.folder={args.work / 'fitted'}",
    ]
    pins += [
        "run.every.evaluate=0",
        "data.micro_batch=0",
        "data.workers=1",
        "backend.kind=cpu",
    ]
    loaded = config.load(str(args.config), [*pins, *args.overrides])
    data = open_sources(resolve(loaded).data)
    train = data.train
    train.prepare()
    settings = config.to_dict(loaded)
    teacher = str(teach(loaded)[0]) if loaded.teacher.fitted else loaded.teacher.model
    settings["teacher"] |= {"model": teacher, "args": {}, "fit": {}}
    if loaded.data.kind == "food_mini":
        root = Path(loaded.data.options.root) / Path(train.name(0)).parts[0]
        common = {
            key: value
            for key, value in settings["data"].items()
            if not hasattr(loaded.data.options, key)
        }
        settings["data"] = {
            **common,
            "kind": "imagefolder",
            "root": str(root.resolve()),
        }
    if args.threads:
        settings["backend"]["threads"] = args.threads
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    return settings, (len(train.classes), len(data.val))


def first_reaching(curve: Sequence[Row], target: float) -> Row | None:
    """Return the first point of a curve that reaches a target."""
    return next((row for row in curve if row["accuracy"] >= target), None)


def curve(rows: Sequence[Row], arm: str, seed: int) -> list[Row]:
    """Return the points of one run."""
    return [row for row in rows if (row["arm"], row["seed"]) == (arm, seed)]


def _accuracy(row: Row) -> str:
    """Return an accuracy in percent, with its 95 % interval if `val_images` is known."""
    text = f"{row['accuracy']:.1f}"
    if not row.get("val_images"):
        return text
    low, high = wilson_interval(row["accuracy"] / 100, row["val_images"])
    return f"{text} ({100 * low:.1f} to {100 * high:.1f})"


def summary(rows: Sequence[Row]) -> str:
    """Return a table of last accuracies, and of time and memory against timm's."""
    lines = []
    seeds = sorted({row["seed"] for row in rows})
    for arm in dict.fromkeys(row["arm"] for row in rows):
        pairs = [
            (curve(rows, arm, seed), curve(rows, "timm", seed))
            for seed in seeds
            if curve(rows, arm, seed)
        ]

        def against(key: str, pairs: Any = pairs) -> str:
            return f"{statistics.mean(mine[-1][key] / theirs[-1][key] for mine, theirs in pairs):.2f}"

        reached = [
            (first_reaching(mine, theirs[-1]["accuracy"]), theirs[-1])
            for mine, theirs in pairs
        ]
        shares = [
            mine["training_seconds"] / theirs["training_seconds"]
            for mine, theirs in reached
            if mine
        ]
        time_to_accuracy = " ".join(f"{share:.2f}" for share in shares)
        if len(shares) < len(pairs):
            time_to_accuracy += f" ({len(shares)} of {len(pairs)} seeds reach it)"
        peaks = [mine[-1]["peak_mib"] for mine, _ in pairs]
        lines.append(
            {
                "trained by": arm,
                "last accuracy": ", ".join(_accuracy(mine[-1]) for mine, _ in pairs),
                "training time": against("training_seconds"),
                "job time": against("job_seconds"),
                "job CPU time": against("job_cpu_seconds"),
                "time to timm's last accuracy": time_to_accuracy,
                "peak memory": f"{statistics.mean(peaks):.0f} MiB",
            }
        )
    return markdown_table(lines)


def plot(rows: Sequence[Row]) -> str:
    """Draw accuracy against seconds of training; lines of a colour are the seeds."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    series = []
    for arm, color in zip(arms, COLORS, strict=False):
        for seed in sorted({row["seed"] for row in rows}):
            points = curve(rows, arm, seed)
            seconds = [point["training_seconds"] for point in points]
            accuracies = [point["accuracy"] / 100 for point in points]
            if points:
                title = f"{arm}, seed {seed}"
                series.append(Series(title, color, seconds, accuracies))
    return lines(
        series, (720, 390), Axis("seconds of training", zero=True), Axis(unit="%")
    ).svg(FILE)


def main() -> None:
    """Make the runs that are missing; write CSV, table and plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--timm", required=True)
    parser.add_argument(
        "--config", type=Path, default=ROOT / "configs" / "vit_food_scratch.yaml"
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        help="of each run; 0: what each chooses itself",
    )
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("overrides", nargs="*", help="key=value of the configuration")
    args = parser.parse_args()
    args.work = args.work or Path(tempfile.mkdtemp(prefix="kd_compare_"))
    args.work.mkdir(parents=True, exist_ok=True)
    settings, sizes = prepare(args)
    rows: list[Row] = []
    for turn, seed in enumerate(args.seeds):
        arms = ["timm", *ARMS]
        for arm in arms if turn % 2 == 0 else reversed(arms):
            file = args.work / f"{re.sub(r'[^a-z0-9]+', '_', arm)}-{seed}.json"
            if not file.is_file():
                run_rows = train_student(arm, seed, args, settings, sizes)
                file.write_text(json.dumps(run_rows))
            rows += json.loads(file.read_text())
            print(f"seed {seed}, {arm}: {rows[-1]}", flush=True)
    rows.sort(
        key=lambda row: (["timm", *ARMS].index(row["arm"]), row["seed"], row["epoch"])
    )
    text = summary(rows)
    print(text)
    command = [
        "python tools/compare.py --timm FOLDER",
        f"--config {args.config.name}",
        "--seeds",
    ]
    command += map(str, args.seeds)
    if args.threads:
        command.append(f"--threads {args.threads}")
    # no folder of this machine
    command += [re.sub("=/.*", "=FOLDER", word) for word in args.overrides]
    path = write(
        f"compare_{args.config.stem.removeprefix('compare_')}", " ".join(command), rows
    )
    path.with_suffix(".md").write_text(f"{HEAD.format(csv=path.name)}\n{text}\n")
    path.with_suffix(".svg").write_text(plot(rows))


HEAD = """# kd and timm, head to head

`{csv}` has the command, commit, hardware, date and each epoch of each run.
Times are shares of timm's, means of the seeds; accuracies are one number a seed, with its 95 % interval (Wilson), which
holds the luck of the validation images; the seeds show that of the run.
"""


if __name__ == "__main__":
    main()
