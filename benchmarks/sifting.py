"""What sifting saves and costs at equal CPU time: each rule against everything, fewer
epochs and random images.

Run: python benchmarks/sifting.py --cifar FOLDER --tiny FOLDER --work runs/sifting
     [--only cifar10 --seeds 0 1 2] python benchmarks/sifting.py --work runs/sifting
     --table      (writes CSV and docs/sifting.svg of the runs so far)

FOLDER holds train/<class>/ and test/<class>/ (or val/<class>/). A fixed part of each is
linked into the work folder. A teacher is fitted once for each source, on more of its
images, and its answers to 4 views are cached for each seed, outside of the time that
counts. Each run is `kd-train` in a process of its own on one thread; its CPU time, by
`os.wait4`, holds start, decoding, training and one evaluation at the end. A row is
added to WORK/rows.jsonl when a run has ended, and is not made again; a run that was cut
off begins anew. A new work folder begins with the rows of the committed CSV of this
hardware. The most telling comparisons come first.

`fewer` trains on everything for as many steps as an arm that keeps half, with a
schedule of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from _record import commit, hardware, newest, write
from kd.core.text import markdown_table
from kd.study.report.charts import FILE, Axis, Series, lines

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
BATCH = 256
KEEP = 0.5
VIEWS = 4
ANNEAL = 0.125
T95 = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
    9: 2.306,
    10: 2.262,
}
"""Student's t for a 95 % interval of the mean of so many differences."""


class Kind(NamedTuple):
    """Data: how many classes, images a class, pixels; and what is done to the training
    images.
    """

    source: str  # "cifar" or "tiny"
    classes: int
    per_class: int
    size: int
    # "tail": 100:1, "noisy": 40 % wrong labels, "copies": a quarter of the images, four
    # times each
    change: str = ""


KINDS = {
    "cifar10": Kind("cifar", 10, 500, 16),
    "tiny50": Kind("tiny", 50, 100, 16),
    "tail": Kind("cifar", 10, 1000, 16, "tail"),
    "noisy": Kind("cifar", 10, 500, 16, "noisy"),
    "copies": Kind("cifar", 10, 500, 16, "copies"),
    "teacher-cifar": Kind("cifar", 10, 1000, 16),
    "teacher-tiny": Kind("tiny", 50, 250, 16),
}
EPOCHS = {"long": 100, "short": 16}
SIFTED = [f"sifter.keep={KEEP}", f"sifter.anneal={ANNEAL}"]
RELATIVE = ["sifter.kind=relative", "sifter.beta_value=1"]


def by_teacher(score: str, choose: str, *keys: str) -> list[str]:
    """Return the overrides of a sifter by the teacher's stored answers."""
    return [
        "sifter.kind=teacher",
        f"sifter.score={score}",
        f"sifter.choose={choose}",
        *keys,
        *SIFTED,
    ]


ARMS: dict[str, list[str]] = {
    "everything": [],
    "fewer": [],
    "history": ["sifter.kind=history", *SIFTED],
    "teacher learnable": by_teacher("learnable", "hardest"),
    "random": ["sifter.kind=random", *SIFTED],
    "teacher loss easiest": by_teacher("loss", "easiest"),
    "relative": RELATIVE,
    "teacher learnable drawn": by_teacher("learnable", "drawn"),
    "relative half": [*RELATIVE, "sifter.shrink=2"],
    "start": ["run.steps=1"],
    "teacher loss": by_teacher("loss", "hardest"),
    "teacher margin middle": by_teacher("margin", "middle"),
    "teacher entropy drawn": by_teacher("entropy", "drawn"),
    "teacher divergence": by_teacher("divergence", "hardest"),
    "teacher learnable weighted": by_teacher(
        "learnable", "drawn", "sifter.reweight=true"
    ),
}
"""`start`: what a run costs that trains one step."""
CORE = [
    "everything",
    "fewer",
    "random",
    "history",
    "teacher learnable drawn",
    "relative",
]


def order(seeds: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """Yield data, schedule, arm and seed of each run, the most telling ones first."""
    runs = [
        *itertools.product(["cifar10"], ["long"], seeds[:1], list(ARMS)[:10]),
        *itertools.product(["cifar10"], ["long"], seeds, CORE),
        *itertools.product(["cifar10"], ["long"], seeds[:1], ARMS),
        *itertools.product(["tiny50"], ["long"], seeds, CORE),
        *itertools.product(["cifar10", "tiny50"], ["short"], seeds, CORE),
        *itertools.product(["tail", "noisy", "copies"], ["long"], seeds, CORE),
    ]
    for data, schedule, seed, arm in runs:
        yield data, schedule, arm, seed


def linked(options: argparse.Namespace, name: str) -> Path:
    """Link a fixed part of the data into the work folder."""
    kind = KINDS[name]
    target = options.work / "data" / name
    if (target / "done").exists():
        return target
    source = getattr(options, kind.source)
    chance = random.Random(0)
    classes = sorted(folder.name for folder in (source / "train").iterdir())[
        : kind.classes
    ]
    for split in ("train", "val" if (source / "val").is_dir() else "test"):
        for number, label in enumerate(classes):
            files = sorted((source / split / label).iterdir())
            if split == "train":
                files = files[: kind.per_class]
                if kind.change == "tail":
                    files = files[
                        : round(kind.per_class * 0.01 ** (number / (kind.classes - 1)))
                    ]
                if kind.change == "copies":
                    files = files[: kind.per_class // 4] * 4
            for count, file in enumerate(files):
                wrong = (
                    split == "train"
                    and kind.change == "noisy"
                    and chance.random() < 0.4
                )
                class_of_file = label
                if wrong:
                    class_of_file = chance.choice(
                        [name for name in classes if name != label]
                    )
                folder = (
                    target / ("train" if split == "train" else "test") / class_of_file
                )
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{label}_{count:04d}{file.suffix}").symlink_to(
                    file.resolve()
                )
    (target / "done").touch()
    return target


def settings(options: argparse.Namespace, name: str, teacher: Path | None) -> Row:
    """Return what all runs on some data share; `teacher`: the folder of the
    fitted one.
    """
    kind = KINDS[name]
    model: Row = {"kind": "torch", "model": "examples.residual:network"}
    model |= {"mean": [0.485, 0.456, 0.406], "std": [0.25, 0.25, 0.25]}
    fitted = {"checkpoint": str(teacher / "model.safetensors")} if teacher else {}
    return {
        "run": {
            "folder": str(options.work / "runs"),
            "every": {"log": 500, "evaluate": 10**6},
        },
        "data": {
            **{
                "kind": "imagefolder",
                "root": str(linked(options, name)),
                "val_split": "test",
            },
            **{
                "image_size": kind.size,
                "batch_size": BATCH,
                "eval_batch": 500,
                "workers": 0,
                "store": "ram",
            },
            "augment": {"crop_scale": 0.6, "jitter": 0.0},
        },
        "teacher": {
            **model,
            **fitted,
            "args": {"width": 24, "classes": kind.classes},
            **{"precision": "bf16", "min_accuracy": 0, "cache": {"views": VIEWS}},
            "fit": {
                "epochs": 24,
                "lr": 5e-3,
                "weight_decay": 0.1,
                "folder": str(options.work / "teachers" / kind.source),
            },
        },
        "student": {**model, "args": {"width": 8, "classes": kind.classes}},
        "losses": [{"kind": "kl", "temperature": 2.0}, {"kind": "ce", "weight": 0.3}],
        "optimizer": {"lr": 5e-3, "weight_decay": 0.1},
        "backend": {"kind": "cpu", "threads": 1, "precision": "bf16"},
    }


def call(
    options: argparse.Namespace,
    command: str,
    content: Row,
    name: str,
    overrides: Sequence[str],
) -> float:
    """Run a command of kd in a process of its own; return its CPU seconds."""
    (options.work / "logs").mkdir(parents=True, exist_ok=True)
    file = options.work / "logs" / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content))
    argv = [sys.executable, "-m", "kd", command, str(file), *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with file.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            argv, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{name} failed: see {log.name}")
    return usage.ru_utime + usage.ru_stime


def teacher_of(options: argparse.Namespace, source: str) -> Path:
    """Fit the teacher of a source, unless it is there."""
    folder = options.work / "teachers" / source
    name = f"teacher-{source}"
    if not (files := list(folder.rglob("model.safetensors"))):
        call(options, "teach", settings(options, name, None), name, [])
        files = list(folder.rglob("model.safetensors"))
    return files[0].parent


def run_one(
    options: argparse.Namespace, data: str, schedule: str, arm: str, seed: int
) -> Row:
    """Train one student and return its row."""
    content = settings(options, data, teacher_of(options, KINDS[data].source))
    cached = options.work / "logs" / f"cache-{data}-{seed}.done"
    if not cached.exists():
        call(options, "cache", content, f"cache-{data}-{seed}", [f"run.seed={seed}"])
        cached.touch()
    images = sum(
        len(os.listdir(folder))
        for folder in (options.work / "data" / data / "train").iterdir()
    )
    epochs = EPOCHS[schedule]
    steps = images // BATCH
    unsifted = 1 + sum(epoch / epochs >= 1 - ANNEAL for epoch in range(1, epochs))
    length = [f"run.epochs={epochs}"]
    if arm == "fewer":
        length = [f"run.steps={round(steps * (unsifted + KEEP * (epochs - unsifted)))}"]
    delay = [f"sifter.sift_delay={steps}"] if "relative" in arm else []
    name = f"{data}-{schedule}-{arm}-{seed}".replace(" ", "_")
    folder = options.work / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    overrides = [f"run.name={name}", f"run.seed={seed}", *length, *ARMS[arm], *delay]
    seconds = call(options, "train", content, name, overrides)
    rows = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    last = [row for row in rows if row["kind"] == "val"][-1]
    return {
        **{
            "data": data,
            "schedule": schedule,
            "arm": arm,
            "seed": seed,
            "images": last["images"],
        },
        "accuracy": round(100 * last["accuracy"], 2),
        "teacher_accuracy": round(100 * last["teacher_accuracy"], 2),
        "cpu_seconds": round(seconds, 1),
        "training_seconds": round(last["seconds"], 1),
        "commit": commit(),
    }


def differs(compared: Sequence[Row], baseline: Sequence[Row]) -> str:
    """Return the mean difference of accuracy over the seeds that both have, and its 95
    % interval.
    """
    by_seed = {row["seed"]: row["accuracy"] for row in baseline}
    gaps = [
        row["accuracy"] - by_seed[row["seed"]]
        for row in compared
        if row["seed"] in by_seed
    ]
    if not gaps or compared == baseline:
        return ""
    spread = (
        T95[len(gaps)] * statistics.stdev(gaps) / len(gaps) ** 0.5
        if len(gaps) > 1
        else None
    )
    return f"{statistics.mean(gaps):+.2f}" + (
        f" ± {spread:.2f}" if spread is not None else " (one seed)"
    )


def summary(rows: Sequence[Row]) -> str:
    """Return the table of each kind of data and schedule as Markdown."""
    text = []
    for data, schedule in dict.fromkeys((row["data"], row["schedule"]) for row in rows):
        here = [
            row for row in rows if (row["data"], row["schedule"]) == (data, schedule)
        ]
        by_arm = {arm: [row for row in here if row["arm"] == arm] for arm in ARMS}
        lines = []
        for arm, of_arm in by_arm.items():
            if not of_arm:
                continue
            full = {row["seed"]: row for row in by_arm["everything"]}
            times = [
                row["cpu_seconds"] / full[row["seed"]]["cpu_seconds"]
                for row in of_arm
                if row["seed"] in full
            ]
            lines.append(
                {
                    "arm": arm,
                    "seeds": len(of_arm),
                    "images": (
                        f"{statistics.mean(row['images'] for row in of_arm) / 1000:.0f} k"
                    ),
                    "CPU time": f"{statistics.mean(times):.2f}" if times else "",
                    "accuracy": (
                        f"{statistics.mean(row['accuracy'] for row in of_arm):.2f} %"
                    ),
                    "against everything": differs(of_arm, by_arm["everything"]),
                    "against fewer epochs": (
                        differs(of_arm, by_arm["fewer"]) if arm != "everything" else ""
                    ),
                }
            )
        text += [
            f"{data}, {schedule} ({EPOCHS[schedule]} epochs)",
            "",
            markdown_table(lines),
            "",
        ]
    return "\n".join(text)


COLORS = {
    "everything": "#98a2b3",
    "fewer": "#2f6fde",
    "random": "#12b76a",
    "history": "#d9822b",
    "teacher learnable drawn": "#9b51e0",
    "relative": "#d92d20",
}


def drawn(rows: Sequence[Row]) -> str:
    """Return accuracy on CIFAR-10 over CPU seconds as an SVG file: a curve a rule,
    short to long.
    """
    curves = []
    for arm, color in COLORS.items():
        points = []
        for schedule in ("short", "long"):
            of_arm = [
                row
                for row in rows
                if (row["data"], row["schedule"], row["arm"])
                == ("cifar10", schedule, arm)
            ]
            if of_arm:
                keys = ("cpu_seconds", "accuracy")
                points.append(
                    [statistics.mean(row[key] for row in of_arm) for key in keys]
                )
        if points:
            x, y = zip(*points, strict=True)
            name = arm.removesuffix(" learnable drawn")
            curves.append(
                Series(name, color, list(x), [accuracy / 100 for accuracy in y])
            )
    return lines(curves, (760, 340), Axis("CPU seconds", log=True), Axis(unit="%")).svg(
        FILE
    )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cifar", type=Path, default=Path("data/cifar10"))
    parser.add_argument("--tiny", type=Path, default=Path("data/tiny-imagenet"))
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "sifting")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--only",
        default="",
        help="runs whose data, schedule, arm or seed, joined by '-', hold this",
    )
    parser.add_argument(
        "--table", action="store_true", help="make no run; write what was made"
    )
    options = parser.parse_args(argv)
    options.work = options.work.resolve()
    return options


def main() -> None:
    """Make the runs that are missing; print the table, and write the CSV
    where asked.
    """
    options = arguments()
    file = options.work / "rows.jsonl"
    options.work.mkdir(parents=True, exist_ok=True)
    if not file.is_file():
        file.write_text("".join(json.dumps(row) + "\n" for row in newest("sifting")[1]))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    finished = {(row["data"], row["schedule"], row["arm"], row["seed"]) for row in rows}
    for task in [] if options.table else order(options.seeds):
        if task in finished or options.only not in "-".join(map(str, task)):
            continue
        rows.append({**run_one(options, *task), "hardware": hardware()})
        finished.add(task)
        print(rows[-1], flush=True)
        with file.open("a") as log:
            log.write(json.dumps(rows[-1]) + "\n")
    print(summary(rows))
    if options.table:
        write(
            "sifting",
            "python benchmarks/sifting.py --cifar FOLDER --tiny FOLDER --work FOLDER",
            rows,
        )
        (ROOT / "docs" / "sifting.svg").write_text(drawn(rows))


if __name__ == "__main__":
    main()
