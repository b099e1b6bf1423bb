"""What does a pruner save in a sweep, and does a sweep survive kills and two processes?

Arms, on a small version of vit_food_scratch with one thread:
- all: kd-sweep of a checkout before Optuna trains 24 combinations to their end;
- pruned: kd-sweep draws rates and temperatures from the same ranges by TPE, with a
  pruner, until it has used as much CPU time;
- killed: six combinations in SQLite, killed three times; `repeated` counts evaluations
  that a run made twice;
- two: six combinations in SQLite by two processes at a time.

Run: python benchmarks/sweep_pruned.py --before CHECKOUT [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import psutil
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from _record import write

KEYS = (
    "run.epochs=8",
    "run.every.evaluate=22",
    "run.baseline=false",
    "data.train_images=60",
    "data.val_images=30",
    "data.image_size=32",
    "teacher.fit.epochs=3",
    "teacher.min_accuracy=0",
    "optimizer.warmup_ratio=0.1",
    "backend.threads=1",
)
LISTS = (
    "optimizer.lr=1e-4,2e-4,5e-4,1e-3,2e-3,5e-3,1e-2,3e-2",
    "losses.0.temperature=1,2,4",
)
RANGES = ("optimizer.lr=loguniform(1e-4,3e-2)", "losses.0.temperature=uniform(1,4)")
FEW = ("run.epochs=2", "optimizer.lr=1e-4,3e-4,1e-3,3e-3,1e-2,3e-2")
TRIALS = 24  # combinations of `LISTS`
ROOT = Path(__file__).resolve().parents[1]


def started(
    folder: Path, words: list[str], code: Path = ROOT, name: str = "out"
) -> subprocess.Popen[bytes]:
    """Start kd-sweep of a checkout; its output is appended to a file."""
    argv = [
        "run.name=small",
        f"run.folder={folder}",
        f"teacher.fit.folder={folder / 'teachers'}",
    ]
    command = [
        sys.executable,
        "-m",
        "kd",
        "sweep",
        "vit_food_scratch",
        *KEYS,
        *argv,
        *words,
    ]
    environment = {**os.environ, "PYTHONPATH": str(code)}
    with (folder / f"{name}.txt").open("ab") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, cwd=code
        )


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """Return the CPU seconds of a process and of all that it started."""
    try:
        head = psutil.Process(process.pid)
        return sum(
            sum(process_of_tree.cpu_times()[:4])
            for process_of_tree in (head, *head.children(recursive=True))
        )
    except psutil.Error:
        return 0.0


def until(
    process: subprocess.Popen[bytes], finished: Callable[[], bool], number: int
) -> float:
    """Wait until a condition holds, send a signal, and return the CPU seconds."""
    seconds = 0.0
    while not finished() and process.poll() is None:
        seconds = max(seconds, cpu_seconds(process))
        time.sleep(0.2)
    process.send_signal(number)
    process.wait()
    return seconds


def facts(study: optuna.Study) -> dict[str, Any]:
    """Return the number of trials by how they ended, and the best score in percent."""
    counts = Counter(trial.state for trial in study.trials)
    ended = counts[TrialState.COMPLETE]
    pruned = counts[TrialState.PRUNED]
    return {"ended": ended, "pruned": pruned, "best": round(100 * study.best_value, 1)}


def repeated(folder: Path) -> int:
    """Return how many evaluations the runs of a sweep made more than once."""
    logs = [log.read_text() for log in folder.glob("small_sweep/*_*.log")]
    steps = [Counter(re.findall(r"\| step ([\d,]+) .*\| val ", text)) for text in logs]
    return sum(count - 1 for counter in steps for count in counter.values())


def largest(folder: Path, storage: str = "") -> optuna.Study:
    """Return the study with most trials: the other one has the best with
    other seeds.
    """
    backend = storage or optuna.storages.JournalStorage(
        JournalFileBackend(str(folder / "small_sweep" / "journal.log"))
    )
    studies = [
        optuna.load_study(study_name=name, storage=backend)
        for name in optuna.get_all_study_names(backend)
    ]
    return max(studies, key=lambda study: len(study.trials))


def all_combinations(folder: Path, before: Path) -> dict[str, Any]:
    """Train all combinations by the earlier code, until the last one has ended."""
    journal = folder / "small_sweep" / "journal.jsonl"

    def finished() -> bool:
        return journal.is_file() and len(journal.read_text().splitlines()) == TRIALS

    seconds = until(started(folder, list(LISTS), before), finished, signal.SIGTERM)
    scores = [
        float(text) for text in re.findall(r'"score": ([\d.]+)', journal.read_text())
    ]
    return {
        "cpu_s": round(seconds),
        "ended": len(scores),
        "pruned": 0,
        "best": round(100 * max(scores), 1),
    }


def pruned(folder: Path, budget: float) -> dict[str, Any]:
    """Search the same ranges with a pruner for some CPU seconds."""
    options = [
        "--trials",
        "1000",
        "--pruner",
        "median(n_startup_trials=4, n_warmup_steps=1)",
    ]
    process = started(folder, [*RANGES, *options])
    seconds = until(process, lambda: cpu_seconds(process) >= budget, signal.SIGTERM)
    return {"cpu_s": round(seconds), **facts(largest(folder))}


def killed(folder: Path) -> dict[str, Any]:
    """Kill a sweep three times, each time while a further run trains."""
    storage = f"sqlite:///{folder / 'trials.db'}"
    words = [*FEW, "--storage", storage]
    for number in (1, 2, 4):
        process = started(folder, words)

        def trains(number: int = number) -> bool:
            return (
                len(list(folder.glob("small_sweep/*/checkpoints/step_00000022")))
                >= number
            )

        until(process, trains, signal.SIGKILL)
        time.sleep(10)  # its child writes a checkpoint
    started(folder, words).wait()
    return {**facts(largest(folder, storage)), "kills": 3, "repeated": repeated(folder)}


def two_sweeps(folder: Path) -> dict[str, Any]:
    """Let two processes share the trials."""
    storage = f"sqlite:///{folder / 'trials.db'}"
    words = [*FEW, "--storage", storage]
    processes = [started(folder, words, name=name) for name in ("first", "second")]
    codes = [process.wait() for process in processes]
    texts = [(folder / f"{name}.txt").read_text() for name in ("first", "second")]
    counts = [
        len(re.findall(r"^sweep: optimizer\.lr=[^,\n]*: accuracy", text, re.MULTILINE))
        for text in texts
    ]
    same = texts[0].partition("\n| ")[2] == texts[1].partition("\n| ")[2] and codes == [
        0,
        0,
    ]
    counted = {"by_first": counts[0], "by_second": counts[1], "same_table": same}
    return {**facts(largest(folder, storage)), **counted, "repeated": repeated(folder)}


def main() -> None:
    """Measure the arms and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--before",
        type=Path,
        required=True,
        help="a checkout before kd-sweep used Optuna",
    )
    parser.add_argument("--folder", type=Path, default=Path("runs", "sweep_pruned"))
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    rows: list[dict[str, Any]] = []
    arms: dict[str, Callable[[Path], dict[str, Any]]] = {
        "all": lambda folder: all_combinations(folder, options.before.resolve()),
        "pruned": lambda folder: pruned(folder, rows[0]["cpu_s"]),
        "killed": killed,
        "two": two_sweeps,
    }
    for arm, measure in arms.items():
        folder = (options.folder / arm).resolve()
        folder.mkdir(parents=True)
        rows.append({"arm": arm, **measure(folder)})
        print(rows[-1], flush=True)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [{key: row.get(key, "") for key in columns} for row in rows]
    write("sweep_pruned", "python benchmarks/sweep_pruned.py --before CHECKOUT", lines)


if __name__ == "__main__":
    main()
