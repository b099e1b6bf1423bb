"""What sifting costs and saves: every sifter, the baselines, three seeds, on food_mini and on CIFAR-10.

Run: python tools/sift_study.py food_mini            (no data needed; writes benchmarks/sifting_food_mini_*.csv and .md)
     python tools/sift_study.py cifar10 --root FOLDER  (FOLDER/train/<class>/*.jpg and FOLDER/test/<class>/*.jpg)

One teacher a dataset, fitted first; its logits are cached ahead, as a user with several runs would do, so that all runs
pay the student alone. The last evaluation counts, not the best. `--jobs` runs stand beside each other, one thread each.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

VIEWS = 4
HISTORY = (0.75, 0.6, 0.5, 0.4)
RELATIVE = (0.5, 1.0, 3.0)
XCIT = {"embed_dim": 64, "depth": 2, "num_heads": 4, "cls_attn_layers": 1}
EQUAL = "none, in the time of history keep 0.5"
"""The strongest baseline: everything, for fewer steps, with a schedule that decays to its end."""


def methods(epochs: int, steps_per_epoch: int) -> dict[str, list[str]]:
    """Return the overrides of every method, by name."""
    made = {"none": ["sifter.kind=none"]}
    whole = 1 + sum((epoch / epochs) >= 0.875 for epoch in range(1, epochs))
    equal = round(steps_per_epoch * (whole + 0.5 * (epochs - whole)))
    made[EQUAL] = ["sifter.kind=none", f"run.steps={equal}"]
    for keep in (0.6, 0.5):
        made[f"random keep {keep:g}"] = ["sifter.kind=random", f"sifter.keep={keep}"]
    for beta in RELATIVE:
        made[f"relative beta {beta:g}"] = [
            "sifter.kind=relative",
            f"sifter.beta_value={beta}",
            f"sifter.sift_delay={steps_per_epoch}",
        ]
    for keep in HISTORY:
        history = ["sifter.kind=history", f"sifter.keep={keep}"]
        made[f"history keep {keep:g}"] = history
    return made


def base(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return the configuration that all runs share."""
    data: dict[str, Any] = {"image_size": 64, "batch_size": 32, "micro_batch": 16, "eval_batch": 200, "workers": 0}
    if given.dataset == "food_mini":
        data |= {"kind": "food_mini", "root": str(work / "food_mini"), "label_noise": 0.05}
    else:
        data |= {"kind": "imagefolder", "root": str(subset(given, work)), "val_split": "test"}
    kernels = {"attention": "unfused"}
    return {
        "run": {"folder": str(work / "runs"), "epochs": given.epochs, "every": {"log": 50, "evaluate": 10**6}},
        "data": {**data, "augment": {"crop": 0.35, "jitter": 0.2}},
        "teacher": {
            "model": "xcit_nano_12_p16_224",
            "args": {"embed_dim": 128, "depth": 3, "num_heads": 4, "cls_attn_layers": 1},
            "precision": "fp32",
            **kernels,
            "min_accuracy": 0,
            "fit": {"epochs": given.teacher_epochs, "lr": 1.5e-3, "warmup": 0.1, "folder": str(work / "teachers")},
        },
        "student": {"model": "xcit_nano_12_p16_224", "args": XCIT, **kernels},
        "losses": [{"kind": "kl", "temperature": 2.0}],
        "optimizer": {"lr": 3e-3, "warmup": 0.1},
        "backend": {"kind": "cpu", "precision": "fp32", "threads": 1},
    }


def subset(given: argparse.Namespace, work: Path) -> Path:
    """Link the first images of each class into a folder of their own."""
    for split, count in (("train", given.per_class), ("test", 100)):
        for source in sorted((Path(given.root) / split).iterdir()):
            target = work / "cifar10" / split / source.name
            target.mkdir(parents=True, exist_ok=True)
            for file in sorted(source.iterdir())[:count]:
                if not (target / file.name).exists():
                    os.link(file, target / file.name)
    return work / "cifar10"


def one(task: tuple[dict[str, Any], str, int, list[str]]) -> dict[str, Any]:
    """Run one method with one seed in this process and return its row."""
    settings, name, seed, overrides = task
    import torch

    from kd import config
    from kd.jobs.train import train

    torch.set_num_threads(1)
    label = name.replace(" ", "_").replace(",", "")
    chosen = config.load(settings, [*overrides, f"run.seed={seed}", f"run.name={label}-{seed}"])
    clock, cpu = time.perf_counter(), time.process_time()
    result = train(chosen)
    wall, cpu = time.perf_counter() - clock, time.process_time() - cpu
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "val"][-1]
    train = [row for row in rows if row["kind"] == "train"]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    scored = name.startswith("relative")
    answers = sum(row["candidates"] if scored else row["trained"] for row in epochs) or last["images"]
    return {
        "method": name,
        "seed": seed,
        "accuracy": round(100 * last["accuracy"], 2),
        "teacher_accuracy": round(100 * last["teacher_accuracy"], 2),
        "images_trained": last["images"],
        "teacher_answers": int(answers),
        "teacher_forwards": int(sum(row["teacher_images"] for row in train)),
        "training_seconds": round(last["seconds"], 2),
        "job_seconds": round(wall, 2),
        "job_cpu_seconds": round(cpu, 2),
    }


def prepare(settings: dict[str, Any], seeds: Sequence[int]) -> int:
    """Fit the teacher, fill the cache of each seed; return the steps of an epoch."""
    from kd import config
    from kd.jobs.cache import cache
    from kd.jobs.teach import teach
    from kd.setup.data import open_sources
    from kd.setup.recipe import resolve

    first = config.load(settings)
    folder = teach(first)[0]
    settings["teacher"] |= {"model": str(folder), "args": {}, "cache": {"views": VIEWS}}
    settings["teacher"]["fit"] = {}
    for seed in seeds:
        cache(config.load(settings, [f"run.seed={seed}"]))
    return len(open_sources(resolve(first).data).train) // first.data.batch_size


def earlier(path: str) -> list[dict[str, Any]]:
    """Return the rows of a CSV that this study wrote."""
    if not path:
        return []
    with open(path) as file:
        found = csv.DictReader(line for line in file if not line.startswith("#"))
        return [{k: v if k == "method" else float(v) if "." in v else int(v) for k, v in row.items()} for row in found]


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the table of means and spreads as Markdown."""
    from kd.core.text import table

    baseline = [row for row in rows if row["method"] == "none"]
    full = statistics.mean(row["images_trained"] for row in baseline)
    cpu = statistics.mean(row["job_cpu_seconds"] for row in baseline)
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        accuracy = [row["accuracy"] for row in own]
        mean = {key: statistics.mean(row[key] for row in own) for key in own[0] if key not in ("method",)}
        lines.append(
            {
                "method": name,
                "images trained": f"{100 * mean['images_trained'] / full:.0f} %",
                "teacher answers": f"{100 * mean['teacher_answers'] / full:.0f} %",
                "CPU time saved": f"{100 * (1 - mean['job_cpu_seconds'] / cpu):.0f} %",
                "accuracy": f"{mean['accuracy']:.1f} +- {statistics.stdev(accuracy) if len(own) > 1 else 0:.1f} %",
                "against none": f"{mean['accuracy'] - statistics.mean(r['accuracy'] for r in baseline):+.1f}",
            }
        )
    return table(lines)


def main() -> None:
    """Run the study and write its CSV and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=["food_mini", "cifar10"])
    parser.add_argument("--root", default="data/cifar10")
    parser.add_argument("--per-class", type=int, default=300, help="CIFAR-10 training images a class")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--teacher-epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="methods whose name holds this")
    parser.add_argument("--join", default="", help="a CSV of an earlier part, whose rows come first in the table")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--work", default="", help="where runs are kept; a run that is there is not made again")
    given = parser.parse_args()
    from _record import write

    work = Path(given.work or tempfile.mkdtemp(prefix="sift_study_"))
    settings = base(given, work)
    steps = prepare(settings, range(given.seeds))
    chosen = {n: o for n, o in methods(given.epochs, steps).items() if given.only in n}
    tasks = [(settings, name, seed, overrides) for seed in range(given.seeds) for name, overrides in chosen.items()]
    with ProcessPoolExecutor(given.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:  # type: ignore[call-overload]
        rows = earlier(given.join)
        for row in pool.map(one, tasks):
            rows.append(row)
            print(row, flush=True)
    text = summary(rows)
    print(text)
    path = write(f"sifting_{given.dataset}", " ".join(["python tools/sift_study.py", *_public(sys.argv[1:])]), rows)
    path.with_suffix(".md").write_text(f"{HEAD.format(dataset=given.dataset, csv=path.name)}\n{text}\n")


def _public(argv: Sequence[str]) -> list[str]:
    """Return the arguments without the folders of this machine."""
    hidden = {i for i, word in enumerate(argv) if i and argv[i - 1] in ("--root", "--work", "--join")}
    return ["FOLDER" if i in hidden else word for i, word in enumerate(argv)]


HEAD = """# Sifting on {dataset}

Mean and standard deviation over the seeds of `{csv}`, which holds the command, commit, hardware and date. CPU time of
the whole job (build, training, one evaluation), one thread a run; the teacher's logits come from the cache. "Images
trained" and "teacher answers" are shares of what `none` uses.
"""


if __name__ == "__main__":
    main()
