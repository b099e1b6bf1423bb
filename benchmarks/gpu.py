"""Everything that needs an NVIDIA GPU, in one command: tests, speed, memory, execution
modes, export.

Run: make gpu [TINY=1] [TIMM=FOLDER] [OUT=FOLDER]    or    PYTHONPATH=. python benchmarks/gpu.py --help

Nothing is downloaded or installed: it takes the torch (2.9 or newer) and the timm of
this Python. Each part is a process of its own, so that one that fails or hangs does not
end the others. Finished parts are kept in `--work`; the same command goes on where a
time limit cut it. `--tiny` runs the same parts on the CPU with tiny models, in the
suite. Photographs are painted and teachers have random weights: only time, memory and
differences are measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from _gpu_parts import (
    REAL,
    ROOT,
    TINY,
    Row,
    Scale,
    configurations,
    export,
    memory,
    nccl,
    resume,
    row,
    run,
    step,
    student,
    teacher,
    tests,
    timm,
)

NEEDED = (
    "torch",
    "timm",
    "omegaconf",
    "safetensors",
    "accelerate",
    "rich",
    "PIL",
    "yaml",
)
PARTS = {
    function.__name__: function
    for function in (
        run,
        student,
        configurations,
        step,
        tests,
        resume,
        nccl,
        teacher,
        memory,
        export,
        timm,
    )
}
"""In the order of their worth: whole runs, how fast a student can learn, the shipped
configurations.
"""
SECONDS = {
    "run": 150.0,
    "student": 110.0,
    "configurations": 110.0,
    "step": 90.0,
    "tests": 120.0,
    "resume": 40.0,
    "nccl": 30.0,
    "teacher": 60.0,
    "memory": 50.0,
    "export": 60.0,
    "timm": 150.0,
}
"""Longest time of a part, so that one that hangs does not take that of the others."""


# ---- the command
# --------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tiny", action="store_true", help="the same on the CPU, in seconds"
    )
    parser.add_argument(
        "--timm",
        default="",
        metavar="FOLDER",
        help="a checkout of timm, for its train.py",
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="what is finished (default: runs/gpu, or runs/gpu_tiny)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the CSV (default: benchmarks; with --tiny: --work)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.8,
        help="start nothing after them, and end what runs",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help="longest time of a part (default: its own)",
    )
    parser.add_argument("--fresh", action="store_true", help="forget what is finished")
    parser.add_argument(
        "--part", choices=PARTS, help="this part alone, in this process"
    )
    options = parser.parse_args(argv)
    options.work = (
        options.work or ROOT / "runs" / ("gpu_tiny" if options.tiny else "gpu")
    ).absolute()
    options.matrices = (64, 128) if options.tiny else ()
    return options


def main(argv: list[str] | None = None) -> Path:
    """Run what is not finished, then write the CSV of all that is; return its path."""
    options = arguments(argv)
    end = time.monotonic() + 60 * options.minutes
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"missing: {', '.join(missing)}. Put them on PYTHONPATH; nothing is"
            " installed here"
        )
    scale = TINY if options.tiny else REAL
    if options.fresh:
        shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True, exist_ok=True)
    if options.part:
        finish(options.part, scale, options)
        raise SystemExit(0)
    from _record import write

    command = " ".join(
        [
            "make gpu",
            *(["TINY=1"] if options.tiny else []),
            *(["TIMM=FOLDER"] if options.timm else []),
        ]
    )
    rows = []
    path = options.work
    for name in (
        PARTS
    ):  # the CSV is complete after each part, so that what ends this process loses one
        rows += obtain(name, scale, options, end)
        path = write(
            "gpu", command, rows, options.work if options.tiny else options.out
        )
    return path


def obtain(
    name: str, scale: Scale, options: argparse.Namespace, end: float
) -> list[Row]:
    """Return the rows of a part: kept ones, or run it now while there is time."""
    file = options.work / f"{name}.json"
    seconds_left = end - time.monotonic()
    problem = ""
    if not file.is_file() and seconds_left < 20 and not options.tiny:
        problem = "no time was left; run the same command again"
    elif not file.is_file() and options.tiny:
        finish(name, scale, options)
    elif not file.is_file():
        limit = min(seconds_left, options.seconds or SECONDS[name])
        print(f"== {name}, at most {limit:.0f} of {seconds_left:.0f} s", flush=True)
        problem = apart(name, options, limit)
    if problem:
        print(f"== {name}: {problem}", flush=True)
        return [{"part": name, **row("the whole part", 0.0, "not finished", problem)}]
    return [{"part": name, **entry} for entry in json.loads(file.read_text())]


def finish(name: str, scale: Scale, options: argparse.Namespace) -> None:
    """Run a part and keep its rows."""
    import torch

    start = time.perf_counter()
    with torch.compiler.set_stance(
        "force_eager" if options.tiny else "default"
    ):  # tiny: no minute in the compiler
        rows = PARTS[name](scale, options.work, options)
    for entry in rows:
        print(
            f"{name:8s} {entry['what']:40s} {entry['value']:12g} {entry['unit']} "
            f" {entry['note']}",
            flush=True,
        )
    print(f"== {name} took {time.perf_counter() - start:.1f} s", flush=True)
    unfinished = options.work / f"{name}.part"
    unfinished.write_text(json.dumps(rows))
    unfinished.rename(options.work / f"{name}.json")


def apart(name: str, options: argparse.Namespace, limit: float) -> str:
    """Run a part in a process of its own, killed with all it started when the time is
    over; return what went wrong.
    """
    argv = [
        sys.executable,
        __file__,
        "--part",
        name,
        "--work",
        str(options.work),
        "--timm",
        options.timm,
    ]
    process = subprocess.Popen(argv, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "its time was over; run the same command again"
    return f"it ended with {code}; its error is above" if code else ""


if __name__ == "__main__":
    main()
