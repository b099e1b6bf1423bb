"""Images per second of distillation: kd against timm's own train.py, same models, same
photographs, in turns.

Run: python benchmarks/timm_distillation.py --timm FOLDER --data FOLDER [--rounds 3]

`--timm`: a checkout of pytorch-image-models (its train.py; `--kd-model-name` is not in
the package). `--data`: a folder with train/<class>/*.jpg. Whole training loops in
processes of their own, decoding included; the first steps are left out. Teachers have
random weights: their arithmetic is what is timed. On the GPU where there is one.
Precision: bf16 where the device has units for it, else float32, the same for both.
`gflops_fp32`, `gflops_bf16`: the machine's own rate of matrix products before each
round, by which two machines can be compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from mfu import matrix_rate

from _record import write

STUDENT = "vit_tiny_patch16_224"
RUNTIMES = {
    "kd live, openvino": ("teacher.runtime=openvino",),
    "kd live, int8": ("teacher.runtime=onnxruntime", "teacher.precision=int8"),
}
"""How else a live teacher may run: through an extra; and in int8, which changes what it
says a little. `auto` tries OpenVINO only in runs longer than these.
"""
COMPILED = "kd cached, compiled"
"""The student's step through torch.compile, without the seconds of compiling: `auto`
tries it in longer runs.
"""
TEACHERS = {"S": "vit_small_patch16_224", "B": "vit_base_patch16_224"}


def device() -> str:
    """Return where both train."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def bf16_pays() -> bool:
    """Return whether the device has bfloat16 units."""
    if device() == "cuda":
        return True
    info = Path("/proc/cpuinfo")
    return info.is_file() and bool(re.search(r"avx512_bf16|amx_bf16", info.read_text()))


def subset(data: Path, work: Path, train: int, val: int) -> tuple[Path, int]:
    """Link so many training photographs of all classes into a folder; return it and the
    number of classes.
    """
    classes = sorted(folder for folder in (data / "train").iterdir() if folder.is_dir())
    for split, count in (("train", train), ("val", val)):
        for folder in classes:
            target = work / "data" / split / folder.name
            target.mkdir(parents=True)
            photos = sorted(
                path
                for path in folder.rglob("*")
                if path.suffix.lower() in (".jpg", ".jpeg", ".png")
            )
            for i in range(max(1, count // len(classes))):
                (target / f"{i:04d}.jpg").symlink_to(photos[i % len(photos)].resolve())
    return work / "data", len(classes)


def teacher_folder(name: str, num_classes: int, work: Path) -> Path:
    """Write a teacher of random weights as a folder that timm and kd load."""
    import timm
    from timm.models import save_for_hf

    folder = work / f"teacher_{name}"
    model = timm.create_model(TEACHERS[name], num_classes=num_classes)
    save_for_hf(model, str(folder), safe_serialization=True)
    return folder


@dataclass(frozen=True, slots=True)
class Finished:
    """A program that has ended."""

    lines: list[tuple[float, str]]
    """What it printed, with the seconds since its start."""
    seconds: float
    cpu_seconds: float
    """Of its threads and of the processes that it waited for."""
    peak_mib: float
    """Largest resident memory of one of these processes."""


def finished(argv: list[str], environment: dict[str, str] | None = None) -> Finished:
    """Run a program to its end.

    Raises:
        SystemExit: it failed.
    """
    start = time.perf_counter()
    lines = []
    stream = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    assert stream.stdout is not None
    for line in stream.stdout:
        lines.append((time.perf_counter() - start, line))
    _, status, usage = os.wait4(stream.pid, 0)
    stream.returncode = os.waitstatus_to_exitcode(status)
    if stream.returncode:
        raise SystemExit("".join(line for _, line in lines)[-3000:])
    seconds = time.perf_counter() - start
    return Finished(
        lines, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
    )


def train_with_timm(
    timm: str, data: Path, teacher: Path, flags: dict[str, Any], output: Path
) -> Finished:
    """Distill with timm's train.py, by the teacher's softened answers alone; `flags` as
    on its command line.
    """
    flags = {
        "data-dir": data,
        "train-split": "train",
        "val-split": "val",
        "device": device(),
        **flags,
    }
    flags |= {
        "kd-model-name": f"local-dir:{teacher}",
        "distill-loss-weight": 1,
        "task-loss-weight": 0,
    }
    flags |= {
        "opt": "adamw",
        "output": output,
        **({"amp-dtype": "bfloat16"} if bf16_pays() else {}),
    }
    argv = [
        sys.executable,
        str(Path(timm) / "train.py"),
        *(["--amp"] if bf16_pays() else []),
    ]
    for name, value in flags.items():
        argv.append(f"--{name}")
        if value is not True:
            values = value if isinstance(value, list) else [value]
            argv += map(str, values)
    return finished(argv, {"PYTHONPATH": timm})


def run_timm(
    options: argparse.Namespace, teacher: Path, num_classes: int, data: Path, work: Path
) -> list[float]:
    """Train with timm; return the images/s of its log windows."""
    flags: dict[str, Any] = {
        "model": STUDENT,
        "num-classes": num_classes,
        "batch-size": options.batch,
    }
    flags |= {
        "workers": options.workers,
        "epochs": 1,
        "lr": 1e-3,
        "warmup-epochs": 0,
        "log-interval": 2,
    }
    finished_run = train_with_timm(
        options.timm, data, teacher, {**flags, "kd-temperature": 2}, work / "timm"
    )
    text = "".join(line for _, line in finished_run.lines)
    # Train: 0 [   2/13 ( 15%)]  Loss: ...  Time: 4.512s,    7.09/s  (4.620s,    6.93/s)
    # LR: ...
    matches = re.findall(r"Train: 0 \[\s*(\d+)/.*?Time: ([\d.]+)s,", text)
    times = [float(seconds) for step, seconds in matches if int(step) >= options.skip]
    if not times:
        raise SystemExit(f"timm printed no speed:\n{text[-3000:]}")
    return [options.batch / seconds for seconds in times]


def configuration(
    options: argparse.Namespace, teacher: Path, data: Path, work: Path
) -> dict[str, Any]:
    """Return the same work as a configuration of kd."""
    precision = (
        "bf16" if bf16_pays() else "fp32"
    )  # as timm's, and no probe of what is hopeless
    return {
        "run": {
            "folder": str(work / "runs"),
            "steps": options.steps,
            "every": {"log": 2, "evaluate": 10**6},
        },
        "data": {
            "kind": "imagefolder",
            "root": str(data),
            "batch_size": options.batch,
            "eval_batch": 8,
            "workers": options.workers,
        },
        "teacher": {"model": str(teacher), "min_accuracy": 0, "precision": precision},
        "student": {"model": STUDENT},
        "losses": [{"kind": "kl", "temperature": 2.0}],
        "optimizer": {"lr": 1e-3},
        "backend": {"kind": device(), "precision": precision},
    }


def run_kd(
    options: argparse.Namespace,
    settings: dict[str, Any],
    name: str,
    work: Path,
    *overrides: str,
) -> list[float]:
    """Train with kd in a process of its own; return the images/s of its log windows."""
    file = work / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    argv = [
        sys.executable,
        "-m",
        "kd.cli",
        "train",
        str(file),
        f"run.name={name}",
        *overrides,
    ]
    finished(argv)
    rows = [
        json.loads(line)
        for line in (work / "runs" / name / "metrics.jsonl").read_text().splitlines()
    ]
    return [
        row["images_per_second"]
        for row in rows
        if row["kind"] == "train" and row["step"] > options.skip
    ]


def main() -> None:
    """Measure in turns and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--timm", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument(
        "--skip", type=int, default=6, help="first steps that do not count"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--teachers", default="SB")
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="processes that decode, the same for both",
    )
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="kd_timm_"))
    data, num_classes = subset(
        Path(options.data), work, options.batch * options.steps + 64, 28
    )
    rows: list[dict[str, Any]] = []
    machine_rates: dict[str, float] = {}

    def note(round_: int, teacher: str, setting: str, speeds: list[float]) -> None:
        rows.extend(
            {
                "round": round_,
                "teacher": teacher,
                "which": setting,
                "window": i,
                "images_per_second": round(speed, 3),
                **machine_rates,
            }
            for i, speed in enumerate(speeds)
        )
        print(
            round_,
            teacher,
            setting,
            f"{statistics.median(speeds):.2f} images/s",
            flush=True,
        )

    teachers = {
        name: teacher_folder(name, num_classes, work) for name in options.teachers
    }
    settings = {
        name: configuration(options, teachers[name], data, work) for name in teachers
    }
    cached = ("teacher.cache.views=1",)
    for name in teachers:
        file = work / "cache.yaml"
        file.write_text(yaml.safe_dump(settings[name]))
        subprocess.run(
            [
                sys.executable,
                "-m",
                "kd.cli",
                "cache",
                str(file),
                "run.name=fill",
                *cached,
            ],
            check=True,
        )
    for turn in range(options.rounds):
        machine_rates = rates()
        for name in teachers:
            note(
                turn,
                name,
                "timm",
                run_timm(options, teachers[name], num_classes, data, work),
            )
            note(
                turn,
                name,
                "kd live",
                run_kd(options, settings[name], f"live-{name}-{turn}", work),
            )
            for kind in runtimes():
                run = f"{kind.split()[-1]}-{name}-{turn}"
                note(
                    turn,
                    name,
                    kind,
                    run_kd(options, settings[name], run, work, *RUNTIMES[kind]),
                )
            note(
                turn,
                name,
                "kd cached",
                run_kd(options, settings[name], f"cached-{name}-{turn}", work, *cached),
            )
            run = f"compiled-{name}-{turn}"
            note(
                turn,
                name,
                COMPILED,
                run_kd(
                    options, settings[name], run, work, *cached, "student.compile=on"
                ),
            )
        alone = {
            **settings[options.teachers[0]],
            "losses": [{"kind": "ce"}],
            "teacher": {},
        }
        note(
            turn, "-", "kd labels only", run_kd(options, alone, f"labels-{turn}", work)
        )
    report(rows, list(teachers))
    argv = [
        "python benchmarks/timm_distillation.py --timm FOLDER --data FOLDER",
        f"--rounds {options.rounds}",
    ]
    argv.append(f"--steps {options.steps} --batch {options.batch}")
    argv += [f"--teachers {options.teachers}"] if options.teachers != "SB" else []
    write("timm_distillation", " ".join(argv), rows)


def rates() -> dict[str, float]:
    """Return the device's rates of matrix products, GFLOP/s."""
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return {
        f"gflops_{name}": round(matrix_rate(torch.device(device()), dtype) / 1e9, 1)
        for name, dtype in types.items()
    }


def runtimes() -> list[str]:
    """Return which other runtimes are worth a look here: with bfloat16 units, int8 is
    not.
    """
    if device() == "cuda":
        return []
    candidates = (
        RUNTIMES
        if importlib.util.find_spec("openvino")
        else [kind for kind in RUNTIMES if "openvino" not in kind]
    )
    return [kind for kind in candidates if not (bf16_pays() and "int8" in kind)]


def report(rows: list[dict[str, Any]], teachers: list[str]) -> None:
    """Print medians and the ratios that were asked for."""

    def median(teacher: str, kind: str) -> float:
        return statistics.median(
            row["images_per_second"]
            for row in rows
            if (row["teacher"], row["which"]) == (teacher, kind)
        )

    print(
        f"precision {'bf16' if bf16_pays() else 'float32'}; labels only"
        f" {median('-', 'kd labels only'):.2f} images/s"
    )
    for name in teachers:
        timm = median(name, "timm")
        numbers = [f"ViT-{name} -> ViT-Ti: timm {timm:.2f}"]
        numbers += [
            f"{kind} {median(name, kind):.2f} ({median(name, kind) / timm:.2f}x)"
            for kind in ("kd live", *runtimes(), "kd cached", COMPILED)
        ]
        share = median(name, "kd cached") / median("-", "kd labels only")
        print(", ".join(numbers), f"images/s; cached {share:.2f} of labels only")


if __name__ == "__main__":
    main()
