"""The first run, three seeds: distilled against the same student on labels alone, for
the same CPU time.

Run: python benchmarks/make_run.py [--seeds 0 1 2] [--work FOLDER] [--threads 1] [key=value ...]

Each seed draws its own labels and so fits its own teacher. `smoothing` is the baseline
of the run itself: label smoothing 0.1, fresh views, and the length of the
configuration, which is that of equal CPU time. Two more ways that a user would try are
`strong augmentation` (rand-augment, larger jitter) and, of the first seed, `half
length`. `all labels` is the run of the first seed with every label, `scratch` that of
vit_food_scratch with a baseline of equal time. CPU seconds are of training, without
evaluations: those of the fit, of the student with its new outputs, and of labels alone.
Runs that have ended are not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _record import write
from kd import config
from kd.files.run_dir import RunDir
from kd.setup.recipe import fit_folders, resolve

ALONE = [
    "data.labels=all",
    "teacher.model=",
    "teacher.checkpoint=",
    "teacher.pretrained=false",
    "teacher.fit.steps=0",
]
ALONE += [
    "teacher.cache.views=0",
    "data.store=ram",
    "losses=[{kind: ce, label_smoothing: 0.1}]",
    "run.baseline=false",
]
STRONG = ["data.augment.policy=rand-m9-mstd0.5", "data.augment.jitter=0.4"]
SCRATCH = ["run.baseline_steps=1500"]
FULL = ["data.labels=all", "data.labels_per_class=0"]


def train(
    name: str, work: Path, overrides: list[str], file: str = "vit_food"
) -> tuple[RunDir, config.Config]:
    """Run `kd-train` in a process of its own, and return its folder and
    configuration.
    """
    keys = [f"run.name={name}", f"run.folder={work}", *overrides]
    subprocess.run([sys.executable, "-m", "kd", "train", file, *keys], check=True)
    return RunDir(work / name), config.load(file, keys)


def row(
    seed: int, arm: str, folder: RunDir, distilled: RunDir | None, fit: float = 0.0
) -> dict[str, Any]:
    """Return the last score of a run and what its training took; `gain` of `distilled`
    over it on the same images.
    """
    scored = folder.scored()
    last = folder.metrics("train")[-1]
    assert scored is not None
    accuracy = scored.samples["accuracy"]
    distilled_score = None if distilled is None else distilled.scored()
    gain: float | str = ""
    if distilled_score is not None:
        distilled_accuracy = distilled_score.samples["accuracy"]
        gain = own_difference(distilled_accuracy.right, accuracy.right)
    return {
        "seed": seed,
        "arm": arm,
        "steps": last["step"],
        "fit_cpu_seconds": fit,
        "cpu_seconds": last["cpu_seconds"],
        "cpu_seconds_in_all": round(fit + last["cpu_seconds"], 3),
        "accuracy": round(100 * scored.row["accuracy"], 2),
        "teacher_accuracy": (
            round(100 * scored.row["teacher_accuracy"], 2) if distilled is None else ""
        ),
        "gain": gain,
    }


def own_difference(first: Any, second: Any) -> float:
    """Return how many percent points more of the same images `first` has right."""
    return round(100 * float(first.mean() - second.mean()), 2)


def of_a_seed(
    seed: int,
    work: Path,
    shared: list[str],
    ways: Sequence[str] = (),
    arm: str = "",
    file: str = "vit_food",
) -> list[dict[str, Any]]:
    """Return the rows of one run, of its baseline and of more ways; `arm`: another run
    than that of few labels.
    """
    name = {"": f"seed{seed}", "all labels": f"seed{seed}_full"}.get(arm, arm)
    keys = [
        *{"all labels": FULL, "scratch": SCRATCH}.get(arm, []),
        f"run.seed={seed}",
        *shared,
    ]
    folder, settings = train(name, work, keys, file)
    fits = fit_folders(resolve(settings), folder.manifest()["data"]).values()
    fit = sum(
        RunDir(fitted.path).metrics("train")[-1]["cpu_seconds"] for fitted, _ in fits
    )
    end = f", {arm}" if arm else ""
    rows = [
        row(seed, f"distilled{end}", folder, None, fit),
        row(seed, f"smoothing{end}", folder.baseline(), folder),
    ]
    steps = settings.run.baseline_steps
    for way in ways:
        count, extra = (steps // 2, []) if way == "half length" else (steps, STRONG)
        length = [f"run.steps={count}", f"run.every.evaluate={-(-count // 2)}"]
        student, _ = train(
            f"{name}_{way.split()[0]}",
            work,
            [f"run.seed={seed}", *ALONE, *length, *extra, *shared],
        )
        rows.append(row(seed, way, student, folder))
    return rows


def main() -> None:
    """Make the runs that are missing and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/make_run"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    shared = [f"backend.threads={options.threads}", *options.overrides]
    rows = []
    for seed in options.seeds:
        ways = [
            "strong augmentation",
            *(["half length"] if seed == options.seeds[0] else []),
        ]
        rows += of_a_seed(seed, options.work, shared, ways)
    rows += of_a_seed(options.seeds[0], options.work, shared, arm="all labels")
    rows += of_a_seed(
        options.seeds[0], options.work, shared, arm="scratch", file="vit_food_scratch"
    )
    print(json.dumps(rows, indent=1))
    write("make-run", f"python benchmarks/make_run.py {' '.join(sys.argv[1:])}", rows)


if __name__ == "__main__":
    main()
