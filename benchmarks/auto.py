"""Do the automatic choices of threads and workers cost speed? `auto` against every pinned pair, in turns of seconds.

Run: python benchmarks/auto.py [--data FOLDER] [--trials 3] [--steps 424] [--batch 32] [--only NAME ...] [--pairs ...]

Five configurations: `vit_food` (live), and with a folder of photographs at 224 px `labels`, `live`, `cached`, and
`tiny` (a tiny student on stored pixels). Each is trained with `auto` and with pinned pairs of threads and workers, on a
quiet machine and beside a busy neighbour (a process that multiplies matrices). The runs of a trial are processes that
take turns of some steps: all but one are stopped (SIGSTOP). One run differs from its repetition by up to a third when
they follow each other, because the machine changes its speed within a minute. A row is one turn: its mean step, the
steps after a stop left out, the comparisons of `auto` included, and the threads that the run had at its end. A trial's
ratio is the geometric mean of its turns; `settled` leaves out those with a part of the first comparison of threads,
which costs a long run nothing. The goal is auto >= 0.95 of the best pair in every trial. Of runs of the same speed,
noise makes one the best.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from timm_distillation import bf16_pays

from _record import write
from kd.core.host import cores

VIT_FOOD = Path(__file__).parent.parent / "configs" / "vit_food.yaml"
FIRST, TURN = (32, 64), 16
"""Where a run's first turns end, and steps of the others. A stop inside a comparison of threads would spoil it."""
FAR = 1.4
"""Times the best pair's step; a pair that is slower is not trained to its end."""
SETTLED = 2
"""Turns until the first comparison of threads is over."""
WARM, SETTLE = 4, 2
"""Steps that are not counted: at the start, and after each stop."""
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


def photographs(root: str, batch: int) -> dict[str, Any]:
    """Return a configuration of a folder of photographs at 224 px. Only time is measured."""
    return {
        "data": {"kind": "imagefolder", "root": root, "image_size": 224, "batch_size": batch},
        "student": {"model": "vit_tiny_patch16_224"},
        "losses": [{"kind": "ce"}],
    }


def configurations(data: str, batch: int) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Return by name a configuration and its overrides."""
    found: dict[str, tuple[Any, tuple[str, ...]]] = {
        "vit_food": (
            yaml.safe_load(VIT_FOOD.read_text()),
            ("teacher.fit.epochs=1", "teacher.fit.steps=2", "teacher.fit.evaluate=0"),
        )
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
            "labels": (photographs(data, batch), ()),
            "live": (photographs(data, batch), teacher),
            "cached": (photographs(data, batch), (*teacher, "teacher.cache.views=1")),
            "tiny": (photographs(data, batch), (*tiny, "data.store=disk")),
        }
        fast = ("teacher.precision=bf16", "backend.precision=bf16") if bf16_pays() else ()
        found = {name: (config, own + (() if name == "vit_food" else fast)) for name, (config, own) in found.items()}
    return found


def pairs(only: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return the pinned pairs of threads and workers that are compared with `auto`, as `2t1w`; `only` some of them."""
    found: dict[str, tuple[str, ...]] = {"auto": ()}
    for threads in sorted({cores(), max(1, cores() // 2)}):
        for workers in sorted({0, 1, max(1, cores() - 1)}):
            found[f"{threads}t{workers}w"] = (f"backend.threads={threads}", f"data.workers={workers}")
    return {pair: pinned for pair, pinned in found.items() if not only or pair in ("auto", *only)}


def busy() -> None:
    """Multiply matrices on one thread until it is ended."""
    torch.set_num_threads(1)
    matrix = torch.randn(1024, 1024)
    while True:
        torch.mm(matrix, matrix)


class Run:
    """A `kd-train` of its own that can be stopped."""

    def __init__(self, work: Path, name: str, config: Any, overrides: tuple[str, ...]) -> None:
        """Prepare; it starts in its first turn. Caches and stores are those of the folder."""
        file, self.rows, self.process = work / f"{name}.yaml", work / name / "metrics.jsonl", None
        file.write_text(yaml.safe_dump(config))
        own = [*overrides, f"run.folder={work}", f"run.name={name}"]
        self.argv = [sys.executable, "-m", "kd.cli", "train", str(file), *own]
        self.shown = work / f"{name}.out"
        self.turns: list[float] = []
        """Milliseconds of a step in each turn, the mean."""
        self.threads: list[int] = []
        """At the end of each turn."""

    def train(self) -> list[float]:
        """Return the milliseconds of the steps so far."""
        lines = self.rows.read_text().splitlines() if self.rows.is_file() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [row["step_ms"] for row in found if row["kind"] == "train"]

    def made(self) -> int:
        """Return about how many steps were made; it must take no time, since two threads wait for each other."""
        if not self.rows.is_file():
            return 0
        with self.rows.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 4096))
            return max(map(int, re.findall(rb'"step": (\d+)', file.read())), default=0)

    def turn(self, until: int, last: bool) -> None:
        """Let it go on to a step and stop it; in the last turn to its end."""
        begin = len(self.train())
        if self.process is None:
            with self.shown.open("w") as shown:
                self.process = subprocess.Popen(self.argv, stdout=shown, stderr=shown, start_new_session=True)
        os.killpg(self.process.pid, signal.SIGCONT)
        while self.process.poll() is None and (last or self.made() < until):
            time.sleep(0.1)
        if self.process.returncode or (self.process.returncode == 0 and not last):
            raise SystemExit(f"{self.argv} ended with {self.process.returncode}")
        if not last:
            os.killpg(self.process.pid, signal.SIGSTOP)
        self.turns.append(statistics.mean(self.train()[begin + (SETTLE if begin else WARM) :]))
        self.threads.append(int(re.findall(r"threads:? (\d+)", self.shown.read_text())[-1]))


def trial(
    work: Path, name: str, config: Any, overrides: tuple[str, ...], steps: int, only: Sequence[str]
) -> dict[str, Run]:
    """Train `auto` and the pairs in turns; return the runs."""
    overrides = (*overrides, f"run.steps={steps}")
    runs = {p: Run(work, f"{name}-{p}", config, (*overrides, *pinned)) for p, pinned in pairs(only).items()}
    ends = [*FIRST, *range(FIRST[-1] + TURN, steps, TURN), steps]
    try:
        for number, until in enumerate(ends):
            going = [run for pair, run in runs.items() if pair == "auto" or not hopeless(run, runs)]
            for run in going[:: 1 if number % 2 else -1]:
                run.turn(until, until == steps)
    finally:
        for run in runs.values():
            if run.process is not None and run.process.poll() is None:
                os.killpg(run.process.pid, signal.SIGKILL)
    return runs


def hopeless(run: Run, runs: dict[str, Run]) -> bool:
    """Return whether a pinned pair was far from the best one in each of its turns; it makes no more of them."""
    pinned = [other.turns for pair, other in runs.items() if pair != "auto"]
    best = [min(turns) for turns in zip(*pinned, strict=False)]
    return bool(best) and all(ms > FAR * least for ms, least in zip(run.turns, best, strict=False))


def verdict(runs: dict[str, Run]) -> str:
    """Return how fast `auto` was against the pair that was best against it, over all turns and the settled ones."""
    own = runs["auto"]
    shares = {
        pair: [theirs / ours for theirs, ours in zip(run.turns, own.turns, strict=True)]
        for pair, run in runs.items()
        if pair != "auto" and len(run.turns) == len(own.turns)
    }
    best = min(shares, key=lambda pair: statistics.geometric_mean(shares[pair]))
    whole, settled = (statistics.geometric_mean(found) for found in (shares[best], shares[best][SETTLED:]))
    return f"auto / best ({best}) = {whole:.3f}, settled {settled:.3f}, threads {own.threads[-1]}"


def main() -> int:
    """Measure, print the ratio of each trial, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="a folder of photographs with train/ and val/")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--steps", type=int, default=424)
    parser.add_argument("--batch", type=int, default=32, help="images of a step at 224 px")
    parser.add_argument("--pairs", nargs="*", default=[], help="pinned pairs, as 2t0w; without it all")
    parser.add_argument("--only", nargs="*", default=[], help="names of configurations")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for name, (config, own) in configurations(given.data, given.batch).items():
            if given.only and name not in given.only:
                continue
            overrides = (*COMMON, *own, f"teacher.fit.folder={work}/teachers")
            if {"teacher.cache.views=1", "data.store=disk"} & set(own):  # only time with a full one is measured
                Run(Path(work), f"{name}-fills", config, (*overrides, "run.epochs=1")).turn(0, last=True)
            for neighbour in (False, True):
                process = multiprocessing.get_context("spawn").Process(target=busy, daemon=True)
                if neighbour:
                    process.start()
                for number in range(given.trials):
                    called = f"{name}-{'busy' if neighbour else 'quiet'}-{number}"
                    runs = trial(Path(work), called, config, overrides, given.steps, given.pairs)
                    facts = {"config": name, "neighbour": neighbour, "trial": number}
                    rows += [
                        {**facts, "pair": pair, "turn": turn, "threads": threads, "step_ms": round(ms, 2)}
                        for pair, run in runs.items()
                        for turn, (ms, threads) in enumerate(zip(run.turns, run.threads, strict=True))
                    ]
                    print(f"{name}, neighbour {neighbour}, trial {number}: {verdict(runs)}", flush=True)
                    write("auto", " ".join(["python benchmarks/auto.py", *sys.argv[1:]]), rows)
                if neighbour:
                    process.terminate()
                    process.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
