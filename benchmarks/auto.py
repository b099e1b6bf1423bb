"""Do the automatic choices of threads and workers cost speed? `auto` against every pinned pair, in turns.

Run: python benchmarks/auto.py [--data FOLDER] [--trials 3] [--steps 120] [--only NAME ...]

Five configurations: `vit_food` (live), and with a folder of photographs at 224 px `labels`, `live`, `cached`, and
`tiny` (a tiny student on stored pixels). Each is trained for `--steps` steps with `auto` and with pinned pairs of
threads and workers, in turns, on a quiet machine and beside a busy neighbour (a process that multiplies matrices). All
have as many steps, since the first epoch decodes more. A row is one run: its images per second without the first steps,
the comparisons of `auto` included, and those of its last quarter. The goal is auto >= 0.95 of the best pair in every
trial. Of five runs of the same speed, noise makes one the best.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import kd
from _record import write
from kd.host import cores

VIT_FOOD = Path(__file__).parent.parent / "configs" / "vit_food.yaml"
WARM = 4
"""First steps that are not counted."""
COMMON = (
    "run.baseline=false",
    "run.every.log=1",
    "run.every.evaluate=1000000",
    "teacher.min_accuracy=0",
    "teacher.precision=fp32",
    "teacher.attention=unfused",
    "teacher.runtime=torch",
    "teacher.compile=off",
    "student.attention=unfused",
    "student.compile=off",
    "backend.kind=cpu",
    "backend.precision=fp32",
)


def photographs(root: str) -> dict[str, Any]:
    """Return a configuration of a folder of photographs at 224 px. Only time is measured."""
    return {
        "data": {"kind": "imagefolder", "root": root, "image_size": 224, "batch_size": 32},
        "student": {"model": "vit_tiny_patch16_224"},
        "losses": [{"kind": "ce"}],
    }


def configurations(data: str) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Return by name a configuration and its overrides."""
    found: dict[str, tuple[Any, tuple[str, ...]]] = {
        "vit_food": (str(VIT_FOOD), ("teacher.fit.epochs=1", "teacher.fit.steps=2", "teacher.fit.evaluate=0"))
    }
    if data:
        teacher = (
            "losses=[{kind: kl}]",
            "teacher.model=vit_small_patch16_224",
            "teacher.fit.epochs=1",
            "teacher.fit.steps=1",
            "teacher.fit.batch_size=8",
        )
        tiny = ("student.model=vit_tiny_patch16_224", "student.args={embed_dim: 48, depth: 2, num_heads: 2}")
        found |= {
            "labels": (photographs(data), ()),
            "live": (photographs(data), teacher),
            "cached": (photographs(data), (*teacher, "teacher.cache.views=1")),
            "tiny": (photographs(data), (*tiny, "data.store=disk")),
        }
    return found


def pairs() -> dict[str, tuple[str, ...]]:
    """Return the pinned pairs of threads and workers that are compared with `auto`."""
    found: dict[str, tuple[str, ...]] = {"auto": ()}
    for threads in sorted({cores(), max(1, cores() // 2)}):
        for workers in sorted({0, 1, max(1, cores() - 1)}):
            found[f"{threads}+{workers}"] = (f"backend.threads={threads}", f"data.workers={workers}")
    return found


def busy() -> None:
    """Multiply matrices on one thread until it is ended."""
    torch.set_num_threads(1)
    matrix = torch.randn(1024, 1024)
    while True:
        matrix @ matrix


def images_per_second(config: Any, overrides: tuple[str, ...]) -> tuple[float, float]:
    """Train, and return the rate without the first steps, and that of the last quarter."""
    with tempfile.TemporaryDirectory() as folder:
        run = kd.train(config, *overrides, f"run.folder={folder}", "run.name=auto")
        rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rates = [row["images_per_second"] for row in rows if row["kind"] == "train"]
    return statistics.harmonic_mean(rates[WARM:]), statistics.median(rates[-len(rates) // 4 :])


def without(rates: dict[str, float]) -> dict[str, float]:
    """Return the rates of the pinned pairs."""
    return {pair: rate for pair, rate in rates.items() if pair != "auto"}


def main() -> int:
    """Measure, print the ratio of each trial, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="a folder of photographs with train/ and val/")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--only", nargs="*", default=[], help="names of configurations")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for name, (config, own) in configurations(given.data).items():
            if given.only and name not in given.only:
                continue
            kept = f"teacher.fit.folder={work}/teachers"
            for neighbour in (False, True):
                process = multiprocessing.get_context("spawn").Process(target=busy, daemon=True)
                if neighbour:
                    process.start()
                for trial in range(given.trials):
                    rates, late = {}, {}
                    for pair, pinned in pairs().items():
                        steps = f"run.steps={given.steps}"
                        rates[pair], late[pair] = images_per_second(config, (*COMMON, *own, kept, steps, *pinned))
                        facts = {"config": name, "neighbour": neighbour, "trial": trial, "pair": pair}
                        figures = {"images_per_second": rates[pair], "last_quarter": late[pair]}
                        rows.append(facts | {key: round(value, 2) for key, value in figures.items()})
                    best, quickest = (max(own, key=own.__getitem__) for own in (without(rates), without(late)))
                    whole, end = rates["auto"] / rates[best], late["auto"] / late[quickest]
                    where = f"{name}, neighbour {neighbour}, trial {trial}"
                    print(f"{where}: auto / best ({best}) = {whole:.3f}, last quarter {end:.3f}", flush=True)
                if neighbour:
                    process.terminate()
                    process.join()
    write("auto", " ".join(["python benchmarks/auto.py", *sys.argv[1:]]), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
