"""CIFAR-10 at full length: two teachers, one student, each way of training it, three
seeds, on the test split.

Run: python benchmarks/full_labels.py --data FOLDER  (FOLDER: train/<class>/ and
     test/<class>/) python benchmarks/full_labels.py [key=value ...] --data FOLDER
     [--work FOLDER] [--jobs 2] [--arms "labels only" kl]

The teachers are fitted, and their averaged answers to 4 views of each image are cached
for each seed. Then each run is `kd-train configs/cifar10.yaml` in the teachers'
precision, in a process of its own on one thread, `--jobs` of them at a time. A row is
added to WORK/full_labels.jsonl when its run has ended, and is not made again; an
unfinished run resumes, and has `resumed` 1: its minutes are of its last process alone.
`images` counts those that were trained on. CPU minutes hold all but the teacher and the
cache: start, decoding, evaluation. `cache_cpu_minutes`: of filling the seed's cache,
which its arms share.

The runs take longer than a machine may be free. Rows of a CSV beside this file count as
made if their `teacher`, the first digits of the SHA-256 of the weights, is that of the
teachers at hand: the same machine fits the same ones again.

Where the folder has runs of "kl" and of "labels only", docs/full_labels.svg shows them;
`full_labels_curves` has its points.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from patience import plot

from _record import RESULTS, commit, write
from kd.core.intervals import wilson_interval
from kd.core.text import markdown_table

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "cifar10.yaml"
Row = dict[str, Any]
CE: Row = {"kind": "ce", "label_smoothing": 0.1}
CACHE = ("teacher.cache.views=4",)
FROM = 4  # epochs before the plot begins
TEXTS = ("arm", "split", "teacher", "commit")  # columns that are no numbers


def kl(temperature: float) -> list[Row]:
    """Return the losses of the configuration at another temperature."""
    return [{"kind": "kl", "temperature": temperature}, {"kind": "ce", "weight": 0.3}]


def sifted(kind: str, *keys: str) -> tuple[str, ...]:
    """Return the overrides by which a sifter keeps 60 % of the images after the first
    epoch, whatever it costs.
    """
    return (*CACHE, f"sifter.kind={kind}", *(keys or ("sifter.keep=0.6",)))


ARMS: dict[str, tuple[list[Row], tuple[str, ...], float]] = {
    "labels only": ([CE], (), 1.0),
    "kl": (kl(2.0), CACHE, 1.0),
    "kl, T 1": (kl(1.0), CACHE, 1.0),
    "kl, T 4": (kl(4.0), CACHE, 1.0),
    "wttm": ([{"kind": "wttm"}], CACHE, 1.0),
    "dist": ([{"kind": "dist", "weight": 2.0}, {"kind": "ce"}], CACHE, 1.0),
    "kl, 8 views": (kl(2.0), ("teacher.cache.views=8",), 1.0),
    "kl, live": (kl(2.0), (), 1.0),
    "history": (kl(2.0), sifted("history"), 1.0),
    "random": (kl(2.0), sifted("random"), 1.0),
    "relative": (
        kl(2.0),
        sifted("relative", "sifter.beta_value=0.667", "sifter.sift_delay=186"),
        1.0,
    ),
    "shortened": (kl(2.0), CACHE, 0.6),
    "labels only, long": ([CE], (), 3.0),
    "kl, long": (kl(2.0), CACHE, 3.0),
}
"""Losses, overrides, and the length as a share of the configuration's epochs. The order
is that of making.
"""


def settings(options: argparse.Namespace) -> Row:
    """Return the configuration of all runs; `options.teachers`: the folders of the
    fitted ones, none before that.
    """
    content = yaml.safe_load(CONFIG.read_text())
    content["data"]["root"] = str(options.data.resolve())
    content["run"] |= {"folder": str(options.work / "runs"), "baseline": False}
    content["teacher"]["fit"]["folder"] = str(options.work / "teachers")
    content["backend"] = {"threads": 1}
    content["teacher"]["cache"]["views"] = 0  # each arm says so
    del content["teacher"]["also"][options.members - 1 :]
    # by files: threads are part of what names a fit, so another number would fit others
    if options.teachers:
        for member, folder in zip(
            [content["teacher"], *content["teacher"]["also"]],
            options.teachers,
            strict=True,
        ):
            member["checkpoint"] = str(folder / "model.safetensors")
        chosen = json.loads((options.teachers[0].parent / "manifest.json").read_text())[
            "modes"
        ]["student"]
        precision = chosen.split("+")[
            0
        ]  # what each run would choose for itself, arms would not share
        content["teacher"]["precision"] = content["backend"]["precision"] = precision
    return content


def call(
    options: argparse.Namespace,
    command: str,
    content: Row,
    name: str,
    overrides: Sequence[str],
) -> Row:
    """Run a command of kd on a configuration in a process of its own; return the
    minutes that it took.
    """
    file = options.work / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content))
    argv = [
        sys.executable,
        "-m",
        "kd",
        command,
        str(file),
        *overrides,
        *options.overrides,
    ]
    start = time.monotonic()
    with (options.work / f"{name}.log").open("w") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{name} failed: see {log.name}")
    return {
        "wall_minutes": round((time.monotonic() - start) / 60, 2),
        "cpu_minutes": round((usage.ru_utime + usage.ru_stime) / 60, 2),
    }


def run_one(options: argparse.Namespace, arm: str, seed: int) -> Row:
    """Train one student and return its row."""
    losses, overrides, length = ARMS[arm]
    content = settings(options)
    content["run"]["epochs"] = round(content["run"]["epochs"] * length)
    name = f"{arm}-{seed}".replace(" ", "_").replace(",", "")
    content["losses"] = losses
    folder = options.work / "runs" / name
    resumed = int(folder.is_dir())
    minutes = call(
        options,
        "train",
        content,
        name,
        [f"run.seed={seed}", f"run.name={name}", *overrides],
    )
    scored = json.loads((folder / "scored.json").read_text())
    rows = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    train = [step_row for step_row in rows if step_row["kind"] == "train"]
    row = scored["row"]
    low, high = wilson_interval(row["accuracy"], scored["images"])
    percent = {
        key: round(100 * row.get(key, 0.0), 2)
        for key in ("teacher_accuracy", "agreement", "ece")
    }
    return {
        "arm": arm,
        "seed": seed,
        "split": scored["split"],
        "images": train[-1]["images"],
        "accuracy": round(100 * row["accuracy"], 2),
        "low": round(100 * low, 2),
        "high": round(100 * high, 2),
        **percent,
        "nll": round(row["nll"], 4),
        "teacher_share": round(
            sum(r.get("ms_teacher", 0) for r in train)
            / sum(r["step_ms"] for r in train),
            3,
        ),
        **minutes,
        "cache_cpu_minutes": filled(options, seed)["cpu_minutes"] if overrides else 0.0,
        "resumed": resumed,
        "teacher": digest(options.teachers),
        "commit": commit(),
    }


def digest(teachers: Sequence[Path]) -> str:
    """Return the first digits of the SHA-256 of teachers' weights."""
    return hashlib.sha256(
        b"".join((teacher / "model.safetensors").read_bytes() for teacher in teachers)
    ).hexdigest()[:12]


def filled(options: argparse.Namespace, seed: int) -> Row:
    """Fill the cache that the arms of a seed share, unless it is full; return the
    minutes that it took.
    """
    name = f"cache-{seed}-{CACHE[0].rpartition('=')[2]}"
    file = options.work / f"{name}.json"
    if not file.is_file():
        minutes = call(
            options, "cache", settings(options), name, [f"run.seed={seed}", *CACHE]
        )
        file.write_text(json.dumps(minutes))
    return json.loads(file.read_text())


def summary(rows: Sequence[Row]) -> str:
    """Return means of the seeds as Markdown, with the difference from the labels alone
    seed by seed.
    """
    plain = {
        row["seed"]: row["accuracy"] for row in rows if row["arm"] == "labels only"
    }
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        of_arm = [row for row in rows if row["arm"] == arm]
        uninterrupted = [row["cpu_minutes"] for row in of_arm if not row["resumed"]]
        gains = [
            row["accuracy"] - plain[row["seed"]]
            for row in of_arm
            if row["seed"] in plain
        ]
        mean = {
            key: statistics.mean(row[key] for row in of_arm)
            for key in of_arm[0]
            if key not in TEXTS
        }
        lines.append(
            {
                "trained by": arm,
                "accuracy": " ".join(f"{row['accuracy']:.2f}" for row in of_arm),
                "on test images": (
                    f"{mean['accuracy']:.2f} (one seed: {mean['low']:.1f} to"
                    f" {mean['high']:.1f})"
                ),
                "over labels only": f"{statistics.mean(gains):+.2f}" if gains else "",
                "agreement": f"{mean['agreement']:.1f}",
                "calibration error": f"{mean['ece']:.1f}",
                "images": f"{mean['images'] / 1e6:.2f} M",
                "CPU minutes": f"{statistics.mean(uninterrupted):.1f}"
                if uninterrupted
                else "",
                "of it the teacher": f"{100 * mean['teacher_share']:.0f} %",
            }
        )
    return markdown_table(lines)


def earlier(options: argparse.Namespace, theme: str) -> list[Row]:
    """Return the rows that were made before with this teacher: in this folder, and in
    the committed CSVs.
    """
    file = options.work / f"{theme}.jsonl"
    rows = (
        [json.loads(line) for line in file.read_text().splitlines()]
        if file.is_file()
        else []
    )
    for path in RESULTS.rglob(f"{theme}_*.csv"):
        with path.open() as opened:
            lines = csv.DictReader(line for line in opened if not line.startswith("#"))
            rows += [
                {
                    key: text if key in TEXTS else json.loads(text)
                    for key, text in line.items()
                }
                for line in lines
            ]
    of_teacher = [row for row in rows if row.get("teacher") == digest(options.teachers)]
    return list(
        {(row["arm"], row["seed"]): row for row in reversed(of_teacher)}.values()
    )


def curves(options: argparse.Namespace) -> list[Row]:
    """Return the accuracy on the validation images after each epoch, of the distilled
    students and of labels alone.
    """
    rows = []
    for arm, student in (("kl", "distilled"), ("labels only", "labels")):
        for seed in options.seeds:
            file = (
                options.work
                / "runs"
                / f"{arm}-{seed}".replace(" ", "_")
                / "metrics.jsonl"
            )
            earlier_curves = (
                [json.loads(line) for line in file.read_text().splitlines()]
                if file.is_file()
                else []
            )
            for row in earlier_curves:
                if row["kind"] == "val" and row["epoch"] > FROM:
                    new_curves = {
                        "student": student,
                        "seed": seed,
                        "epochs": row["epoch"],
                        "accuracy": row["accuracy"],
                    }
                    rows.append(
                        new_curves
                        | {
                            "teacher": row.get("teacher_accuracy", ""),
                            "seconds": row["seconds"],
                        }
                    )
    return rows


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "full_labels")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--members", type=int, default=2, help="teachers, of those of the configuration"
    )
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("overrides", nargs="*", help="key=value of the configuration")
    options = parser.parse_intermixed_args(argv)
    options.work = options.work.resolve()
    options.teachers = []
    return options


def fitted(options: argparse.Namespace) -> list[Path]:
    """Fit the teachers at once, a process each, unless they are there; return their
    folders of weights.
    """
    options.work.mkdir(parents=True, exist_ok=True)
    content = settings(options)
    members = 1 + len(content["teacher"].pop("also"))  # alike but for the seed

    def fit(number: int) -> Path:
        name = f"teacher-{number}"
        call(options, "teach", content, name, [f"teacher.fit.seed={number}"])
        return Path((options.work / f"{name}.log").read_text().splitlines()[-1])

    with ThreadPoolExecutor(options.jobs) as pool:
        return list(pool.map(fit, range(members)))


def main(argv: Sequence[str] | None = None, theme: str = "full_labels") -> None:
    """Make what is missing of the arms; write the CSV and print the table."""
    options = arguments(argv)
    options.teachers = fitted(options)
    finished = {(row["arm"], row["seed"]) for row in earlier(options, theme)}
    missing = [
        (arm, seed)
        for seed in options.seeds
        for arm in options.arms
        if (arm, seed) not in finished
    ]
    failed = []

    def make(pair: tuple[str, int]) -> None:
        try:
            row = run_one(options, *pair)
        except SystemExit as error:  # the other runs go on
            failed.append(str(error))
            print(error, flush=True)
            return
        with (options.work / f"{theme}.jsonl").open("a") as opened:
            opened.write(json.dumps(row) + "\n")
        print(row, flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(
            pool.map(
                partial(filled, options),
                sorted({seed for arm, seed in missing if ARMS[arm][1]}),
            )
        )
        list(pool.map(make, missing))
    order = list(ARMS)
    rows = sorted(
        earlier(options, theme), key=lambda row: (order.index(row["arm"]), row["seed"])
    )
    if rows:
        print(summary(rows))
        start = f"python benchmarks/{theme}.py --data FOLDER"
        command = " ".join(
            [
                start,
                *([] if options.members == 2 else ["--members 1"]),
                *options.overrides,
            ]
        )
        write(theme, command, rows)
        drawn = curves(options) if theme == "full_labels" else []
        if len({row["student"] for row in drawn}) == 2:
            write("full_labels_curves", command, drawn)
            (ROOT / "docs" / "full_labels.svg").write_text(plot(drawn))
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
