"""What a frozen forward costs in each of its forms: torch, compiled, onnxruntime, OpenVINO, int8; in turns.

Run: python benchmarks/teacher.py [--model vit_small_patch16_224] [--size 224] [--batch 16] [--only NAME ...]
Random weights: the logit errors say how each form rounds, nothing about accuracy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from _record import write
from kd.config.validate import installed
from kd.core.types import Batch
from kd.models.classifier import set_attention
from kd.models.load import Spec, load
from kd.models.teacher import LiveTeacher
from kd.setup.modes import ExecutionMode
from kd.setup.teacher import rebuild

CLASSES = [str(i) for i in range(101)]
FORMS = [
    "fp32+unfused",
    "fp32+fused",
    "fp32+fused+compiled",
    "fp32+onnxruntime",
    "fp32+openvino",
    "int8+onnxruntime",
]


def made(name: str, given: argparse.Namespace, device: torch.device) -> LiveTeacher:
    """Return the live teacher of a form, not run yet."""
    torch.manual_seed(0)
    model = load(Spec("teacher", given.model, {}, CLASSES), given.size)
    mode = ExecutionMode.parse(name)
    live = LiveTeacher(
        model, device, remake=(lambda frozen: rebuild(mode, given.size, frozen)) if mode.rebuilt else None
    )
    set_attention(live.model, mode.kernel == "fused")
    return live


def available(name: str) -> bool:
    """Return whether a form can be made here; say so where it cannot."""
    missing = "openvino" in name and not installed("openvino")
    if missing:
        print(f"{name}: left out, openvino is not installed")
    return not missing


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=FORMS, choices=FORMS)
    given = parser.parse_args()
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(1)
    image = torch.randint(256, (given.batch, 3, given.size, given.size), dtype=torch.uint8, generator=generator)
    batch = Batch.of(image, torch.zeros(given.batch, dtype=torch.int64))
    exact_BC = made(FORMS[0], given, device)(batch).logits
    forms, ready, error = {}, {}, {}
    for name in filter(available, given.only):
        start = time.perf_counter()
        forms[name] = made(name, given, device)
        said_BC = forms[name](batch).logits
        ready[name] = time.perf_counter() - start
        error[name] = (said_BC - exact_BC).abs().max().item()
    rows = []
    for number in range(given.rounds):
        for name in forms if number % 2 else reversed(forms):
            start = time.perf_counter()
            forms[name](batch)
            seconds = time.perf_counter() - start
            rows.append(
                {
                    "round": number,
                    "form": name,
                    "images_per_second": round(given.batch / seconds, 3),
                    "seconds_to_first_answer": round(ready[name], 2),
                    "largest_logit_error": f"{error[name]:.3g}",
                    "of_std": f"{error[name] / exact_BC.std().item():.3g}",
                }
            )
    for name in forms:
        speed = statistics.median(row["images_per_second"] for row in rows if row["form"] == name)
        print(
            f"{name:24} {speed:8.2f} images/s, {ready[name]:6.1f} s to its first answer, "
            f"largest logit error {error[name]:.2g} (logits' deviation {exact_BC.std().item():.2g})"
        )
    write("teacher", " ".join(["python benchmarks/teacher.py", *sys.argv[1:]]), rows)


if __name__ == "__main__":
    main()
