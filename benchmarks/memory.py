"""The peak memory of a distillation step, as `kd-train --check` counts it, and as this
machine takes it.

Run: PYTHONPATH=. python benchmarks/memory.py [--batches 8 16 32 64] [--counted 64 128 256 512]

Each measured batch is a process of its own: models are built, one step is made, the
kernel's mark of the largest resident memory is set back, and a second step is made.
`taken` is that mark less what the process held before it built models. `--counted`
batches are only counted, on a GPU's kernel of attention. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from _record import write

MIB = 2**20


def recipe(
    batch: int, precision: str, attention: str, teacher: str, student: str
) -> Any:
    """Return the plans of a run."""
    from kd import config
    from kd.setup.recipe import resolve

    kernel = {"attention": attention}
    return resolve(
        config.load(
            {
                "run": {"steps": 1},
                "data": {"kind": "food_mini", "batch_size": batch, "image_size": 224},
                "teacher": {
                    "model": teacher,
                    "precision": precision,
                    "fit": {"epochs": 1},
                    **kernel,
                },
                "student": {"model": student, **kernel},
                "losses": [{"kind": "kl"}],
                "backend": {"kind": "cpu", "precision": precision},
            }
        )
    )


def models(plan: Any, classes: int, small: bool = False) -> tuple[Any, Any]:
    """Return (distillation, teacher) of random weights."""
    from kd.engine.criterion import StudentWithLoss
    from kd.models.load_classifier import load
    from kd.models.spec import Spec
    from kd.setup.student import build_criterion

    names = [str(number) for number in range(classes)]
    depth = {"depth": 1} if small else {}
    teacher = load(Spec("teacher", plan.teacher.model, depth, names), 224)
    student = load(Spec("student", plan.student.model, depth, names), 224)
    criterion = build_criterion(plan.losses, [None], 0)  # pyright: ignore[reportArgumentType]
    return StudentWithLoss(student, criterion, plan.task), teacher


def status(name: str) -> int:
    """Return a number of this process's memory, bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(
        next(line.split()[1] for line in text.splitlines() if line.startswith(name))
    )


def take(plan: Any, batch: int, classes: int) -> dict[str, float]:
    """Make two steps and return what they took, MiB."""
    from kd.setup.build import build_backend

    backend = build_backend(plan.backend)
    pair = models(
        plan, classes, small=True
    )  # libraries and their kernels are loaded before the start
    step(backend, plan, *pair, 2)
    del pair
    trim()
    before = status("VmRSS")
    step(backend, plan, *models(plan, classes), batch)
    return {"taken": (status("VmHWM") - before) / MIB}


def step(backend: Any, plan: Any, distillation: Any, teacher: Any, batch: int) -> None:
    """Make two steps; the kernel's mark is that of the second."""
    import torch

    from kd.models.classifier import set_attention
    from kd.models.live_teacher import LiveTeacher
    from kd.setup.modes import Trial

    half = torch.bfloat16 if plan.teacher.precision == "bf16" else torch.float32
    live = LiveTeacher(teacher, backend.device, half)
    teacher.to_empty(device="meta")  # the copy is what a run keeps
    for module in (distillation, live.model):
        set_attention(module, plan.teacher.attention == "fused")
    optimizer = torch.optim.AdamW(distillation.parameters(), fused=True)
    with Trial(distillation, live, backend, 224, batch) as trial:
        for _ in range(2):
            trial.__dict__.pop("outputs", None)  # the teacher is asked in each step
            trim()  # what building has freed
            Path("/proc/self/clear_refs").write_text("5")
            trial.step(optimizer)


def trim() -> None:
    """Give freed memory back to the kernel."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def count(plan: Any, batch: int, classes: int) -> dict[str, float]:
    """Return what `--check` counts, MiB."""
    import torch

    from kd.jobs.description import executed_mode, held_bytes, step_bytes
    from kd.models.live_teacher import count_parameters

    with torch.device("meta"):
        distillation, teacher = models(plan, classes)
    bytes_held = held_bytes(plan, distillation, 1)
    bytes_held += count_parameters(teacher) * (
        2 if executed_mode(plan, plan.teacher.precision)[0] else 4
    )
    step = step_bytes(plan, distillation, teacher, batch, reduced=False)
    return {"weights and optimizer": bytes_held / MIB, "step": step / MIB}


def arguments() -> argparse.ArgumentParser:
    """Return what the command takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teacher", default="vit_base_patch16_224")
    parser.add_argument("--student", default="vit_tiny_patch16_224")
    parser.add_argument("--classes", type=int, default=101)
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--precisions", nargs="*", default=["fp32", "bf16"])
    parser.add_argument("--counted", type=int, nargs="*", default=[64, 128, 256, 512])
    parser.add_argument(
        "--one",
        nargs=3,
        metavar=("BATCH", "PRECISION", "ATTENTION"),
        help=argparse.SUPPRESS,
    )
    return parser


def main() -> None:
    """Measure and count, and write the CSV."""
    options = arguments().parse_args()
    if options.one:
        batch, precision, attention = options.one
        plan = recipe(
            int(batch), precision, attention, options.teacher, options.student
        )
        print(json.dumps(take(plan, int(batch), options.classes)))
        return
    rows = []
    cases = [
        (b, p, a)
        for p in options.precisions
        for a in ("unfused", "fused")
        for b in options.batches
    ]
    for batch, precision, attention in [
        *cases,
        *(
            (b, "bf16", "fused")
            for b in options.counted
            if (b, "bf16", "fused") not in cases
        ),
    ]:
        plan = recipe(batch, precision, attention, options.teacher, options.student)
        row: dict[str, Any] = {
            "batch": batch,
            "precision": precision,
            "attention": attention,
        }
        row |= {
            name: round(value)
            for name, value in count(plan, batch, options.classes).items()
        }
        row["counted"] = row["weights and optimizer"] + row["step"]
        if len(rows) < len(cases):
            argv = [sys.executable, __file__, "--one", str(batch), precision, attention]
            argv += [
                "--teacher",
                options.teacher,
                "--student",
                options.student,
                "--classes",
                str(options.classes),
            ]
            env = {
                **os.environ,
                "MALLOC_TRIM_THRESHOLD_": "131072",
            }  # a CPU run keeps what it frees; here it goes
            process = subprocess.run(
                argv, check=True, capture_output=True, text=True, env=env
            )
            answer = process.stdout.splitlines()[-1]
            row["taken"] = round(json.loads(answer)["taken"])
        rows.append(
            {**row, "taken": row.get("taken", ""), "counted / taken": _share(row)}
        )
        print(rows[-1], flush=True)
    write("memory", " ".join(["python benchmarks/memory.py", *sys.argv[1:]]), rows)


def _share(row: dict[str, Any]) -> Any:
    return round(row["counted"] / row["taken"], 3) if "taken" in row else ""


if __name__ == "__main__":
    main()
