"""What does a sweep save? Nine runs of vit_food_scratch, three temperatures by three
rates, as commands and as a sweep.

The CPU seconds of all processes of each: nine `kd-train` that each fit a teacher and
run it in every step; one `kd-sweep`, with its two runs of other seeds, in the middle of
them. `--shared`: also nine commands that share the fitted teacher and run it in every
step. No run has a baseline, each process has one thread, and the pictures are rendered
before.

Run: python benchmarks/sweep.py [--epochs 5] [--shared] [--folder FOLDER] [key=value ...]
"""

from __future__ import annotations

import argparse
import itertools
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kd
from _record import write
from kd.setup.data import open_sources
from kd.setup.recipe import resolve

AXES = {
    "losses.0.temperature": ("1", "2", "4"),
    "optimizer.lr": ("1e-3", "3e-3", "1e-2"),
}


def cpu_seconds(words: list[str]) -> float:
    """Run a command of kd and return the CPU seconds of it and all that it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "kd", *words], check=True, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure the ways and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs", "sweep_benchmark"))
    parser.add_argument("overrides", nargs="*", help="key=value for all")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    shared = ["run.baseline=false", "backend.threads=1"]
    common = [
        "vit_food_scratch",
        f"run.epochs={options.epochs}",
        *shared,
        *options.overrides,
    ]
    data = open_sources(resolve(kd.load_config(common[0], common[1:])).data)
    for source in (data.train, data.val):
        source.prepare()
    calls: list[tuple[str, str, list[str]]] = []
    for way in (
        "own teacher, live",
        *(["shared teacher, live"] if options.shared else []),
    ):
        for i, values in enumerate(itertools.product(*AXES.values())):
            at = options.folder / way.partition(",")[0].replace(" ", "_")
            teachers = at / (str(i) if way.startswith("own") else "teachers")
            keys = [f"{key}={text}" for key, text in zip(AXES, values, strict=True)]
            extra = [
                f"run.folder={at}",
                f"run.name={i}",
                f"teacher.fit.folder={teachers}",
                *keys,
            ]
            calls.append((way, " ".join(keys), ["train", *common, *extra]))
    extra = [
        f"run.folder={options.folder / 'sweep'}",
        f"teacher.fit.folder={options.folder / 'sweep' / 'teachers'}",
    ]
    lists = [f"{key}={','.join(texts)}" for key, texts in AXES.items()]
    calls.insert(
        len(calls) // 2, ("kd-sweep", "all", ["sweep", *common, *extra, *lists])
    )
    rows: list[dict[str, Any]] = []
    for way, run, words in calls:
        rows.append({"way": way, "run": run, "cpu_s": round(cpu_seconds(words), 1)})
        print(rows[-1], flush=True)
    totals = {
        way: sum(row["cpu_s"] for row in rows if row["way"] == way)
        for way in {row["way"] for row in rows}
    }
    for way, total in totals.items():
        print(
            f"{way:22s} {total:8.1f} s of CPU, kd-sweep takes"
            f" {100 * totals['kd-sweep'] / total:.1f} % of it"
        )
    visible = [
        word for word in sys.argv[1:] if not word.startswith(str(options.folder))
    ]
    write(
        "sweep",
        " ".join(
            [
                "python benchmarks/sweep.py",
                *(word for word in visible if word != "--folder"),
            ]
        ),
        rows,
    )


if __name__ == "__main__":
    main()
