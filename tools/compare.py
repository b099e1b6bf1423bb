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
    """Return whether a model of timm is made for one image size, which kd sets by
    itself.
    """
    return hasattr(getattr(timm.create_model(model), "patch_embed", None), "img_size")


def timm_flags(settings: config.Config, classes: int, seed: int) -> Row:
    """Return the flags of timm's train.py that mean what the configuration says."""
    run, data, optimizer, student = (
        settings.run,
        settings.data,
        settings.optimizer,
        settings.student,
    )
    size, warmup = data.image_size, int(run.epochs) * optimizer.warmup_ratio
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
    arguments = {
        **student.args,
        **({"img_size": size} if has_size(student.model) else {}),
    }
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


def curve_of_timm(done: Finished) -> list[Row]:
    """Return accuracy and seconds of training after each epoch, from what timm
    printed.
    """
    rows: list[Row] = []
    seconds = 0.0
    for _, line in done.lines:
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
    found = [row for row in rows if row["kind"] == "val" and row["step"]]
    return [
        {
            "epoch": number,
            "training_seconds": round(row["seconds"], 2),
            "accuracy": round(100 * row["accuracy"], 3),
        }
        for number, row in enumerate(found, 1)
    ]


def one(
    arm: str,
    seed: int,
    given: argparse.Namespace,
    settings: Row,
    sizes: tuple[int, int],
) -> list[Row]:
    """Train one student in a process of its own; return its curve, with what the whole
    job took in each row.

    `sizes` are the numbers of classes and of validation images.
    """
    classes, images = sizes
    name = re.sub(r"\W+", "_", arm) + f"-{seed}"
    if arm == "timm":
        flags = timm_flags(config.load(settings), classes, seed)
        data, teacher = (
            Path(settings["data"]["root"]),
            Path(settings["teacher"]["model"]),
        )
        done = train_with_timm(given.timm, data, teacher, flags, given.work / name)
        rows = curve_of_timm(done)
    else:
        file, folder = given.work / f"{name}.yaml", given.work / name
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
        done = finished([*argv, "run.name=run", *ARMS[arm]])
        rows = curve_of_kd(folder / "run")
    whole = {
        "job_seconds": done.seconds,
        "job_cpu_seconds": done.cpu_seconds,
        "peak_mib": done.peak_mib,
    }
    more = {"val_images": images, **{k: round(v, 1) for k, v in whole.items()}}
    return [{"arm": arm, "seed": seed, **row, **more} for row in rows]


def prepare(given: argparse.Namespace) -> tuple[Row, tuple[int, int]]:
    """Fit the teacher; return the configuration of all runs, and the numbers of classes
    and of validation images.
    """
    pins = [
        "run.baseline=false",
        f"run.folder={given.work / 'teacher'}",
        f"teacher.fit.folder={given.work / 'fitted'}",
    ]
    pins += [
        "run.every.evaluate=0",
        "data.micro_batch=0",
        "data.workers=1",
        "backend.kind=cpu",
    ]
    loaded = config.load(str(given.config), [*pins, *given.overrides])
    data = open_sources(resolve(loaded).data)
    train = data.train
    train.prepare()
    root = (
        Path(loaded.data.options.root) / Path(train.name(0)).parts[0]
        if loaded.data.kind == "food_mini"
        else None
    )
    settings = config.to_dict(loaded)
    teacher = str(teach(loaded)[0]) if loaded.teacher.fitted else loaded.teacher.model
    settings["teacher"] |= {"model": teacher, "args": {}, "fit": {}}
    if root:
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
    if given.threads:
        settings["backend"]["threads"] = given.threads
        os.environ["OMP_NUM_THREADS"] = str(given.threads)
    return settings, (len(train.classes), len(data.val))


def first(curve: Sequence[Row], target: float) -> Row | None:
    """Return the first point of a curve that reaches a target."""
    return next((row for row in curve if row["accuracy"] >= target), None)


def curve(rows: Sequence[Row], arm: str, seed: int) -> list[Row]:
    """Return the points of one run."""
    return [row for row in rows if (row["arm"], row["seed"]) == (arm, seed)]


def _accuracy(row: Row) -> str:
    """Return an accuracy with its 95 % interval, where the number of images is known;
    in percent.
    """
    ends = [
        f"{100 * end:.1f}"
        for end in wilson_interval(row["accuracy"] / 100, row.get("val_images", 0))
    ]
    return f"{row['accuracy']:.1f}" + (
        f" ({' to '.join(ends)})" if row.get("val_images") else ""
    )


def summary(rows: Sequence[Row]) -> str:
    """Return a table: last accuracy, and time and memory against timm's, means of the
    seeds.
    """
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
            (first(mine, theirs[-1]["accuracy"]), theirs[-1]) for mine, theirs in pairs
        ]
        shares = [
            mine["training_seconds"] / theirs["training_seconds"]
            for mine, theirs in reached
            if mine
        ]
        lines.append(
            {
                "trained by": arm,
                "last accuracy": ", ".join(_accuracy(mine[-1]) for mine, _ in pairs),
                "training time": against("training_seconds"),
                "job time": against("job_seconds"),
                "job CPU time": against("job_cpu_seconds"),
                "time to timm's last accuracy": (
                    " ".join(f"{share:.2f}" for share in shares)
                    + (
                        f" ({len(shares)} of {len(pairs)} seeds reach it)"
                        if len(shares) < len(pairs)
                        else ""
                    )
                ),
                "peak memory": (
                    f"{statistics.mean(mine[-1]['peak_mib'] for mine, _ in pairs):.0f} MiB"
                ),
            }
        )
    return markdown_table(lines)


def plot(rows: Sequence[Row]) -> str:
    """Draw accuracy against the seconds of training; lines of a colour are
    the seeds.
    """
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    drawn = [
        Series(
            f"{arm}, seed {seed}",
            color,
            [r["training_seconds"] for r in own],
            [r["accuracy"] / 100 for r in own],
        )
        for arm, color in zip(arms, COLORS, strict=False)
        for seed in sorted({row["seed"] for row in rows})
        if (own := curve(rows, arm, seed))
    ]
    return lines(
        drawn, (720, 390), Axis("seconds of training", zero=True), Axis(unit="%")
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
    given = parser.parse_args()
    given.work = given.work or Path(tempfile.mkdtemp(prefix="kd_compare_"))
    given.work.mkdir(parents=True, exist_ok=True)
    settings, sizes = prepare(given)
    rows: list[Row] = []
    for turn, seed in enumerate(given.seeds):
        arms = ["timm", *ARMS]
        for arm in arms if turn % 2 == 0 else reversed(arms):
            kept = given.work / f"{re.sub(r'[^a-z0-9]+', '_', arm)}-{seed}.json"
            if not kept.is_file():
                kept.write_text(json.dumps(one(arm, seed, given, settings, sizes)))
            rows += json.loads(kept.read_text())
            print(f"seed {seed}, {arm}: {rows[-1]}", flush=True)
    rows.sort(
        key=lambda row: (["timm", *ARMS].index(row["arm"]), row["seed"], row["epoch"])
    )
    text = summary(rows)
    print(text)
    command = [
        "python tools/compare.py --timm FOLDER",
        f"--config {given.config.name}",
        "--seeds",
    ]
    command += [
        *map(str, given.seeds),
        *([f"--threads {given.threads}"] if given.threads else []),
    ]
    command += [
        re.sub("=/.*", "=FOLDER", word) for word in given.overrides
    ]  # no folder of this machine
    path = write(
        f"compare_{given.config.stem.removeprefix('compare_')}", " ".join(command), rows
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
