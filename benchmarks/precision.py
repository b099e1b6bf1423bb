"""bfloat16 or float32 on a CPU: a training step and a frozen forward of networks of all
kinds, in turns.

Run: python benchmarks/precision.py [--rounds 5] [--threads 1 2]

`cpu_ms` is the CPU time of all threads (user and system) of one step or forward of
`images`: on a machine with neighbours the wall-clock time (`ms`) says how busy they
are, and `load` is the system's load average beside it. A step is forward and backward
under autocast, as kd trains a student; a forward is of a network whose weights have the
precision, as kd runs a teacher. `convolved` is the share of multiplications in
convolutions, `depthwise` in those of one channel each, by torch's own count of a
forward. `units`: those of the processor's that multiply bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kd  # isort: skip  # before torch: its threads then wait asleep, and not on the CPU's clock
import torch
from torch import nn

from _record import write
from kd.core.host import BF16_FLAGS
from kd.models.classifier import Classifier, set_attention
from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.setup.modes import convolution_shares

FOOD = {"embed_dim": 64, "depth": 2, "num_heads": 4, "cls_attn_layers": 1}
NETWORKS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "Lite0": ("tf_efficientnet_lite0", {}, 128, 4),
    "ResNet-18": ("resnet18", {}, 112, 4),
    "XCiT of vit_food": ("xcit_nano_12_p16_224", FOOD, 64, 16),
    "ConvNeXt atto": ("convnext_atto", {}, 112, 4),
    "ViT-Ti": ("vit_tiny_patch16_224", {}, 112, 8),
    "residual 16": ("", {}, 32, 32),
    "MobileNetV3": ("mobilenetv3_small_100", {}, 128, 8),
    "XCiT nano": ("xcit_nano_12_p16_224", {}, 112, 8),
}
"""Model of timm, its arguments, pixels, images."""


def built(model: str, args: dict[str, Any], size: int) -> Classifier:
    """Return the network as kd runs it, with random weights."""
    torch.manual_seed(0)
    if not model:
        from examples.residual import network

        return Classifier(network(16), 10, size)
    built_network = load(
        Spec(
            "student", model, args, [str(label) for label in range(10)], free_size=True
        ),
        size,
    )
    set_attention(built_network, False)
    return built_network


def works(
    model: Classifier, size: int, images: int
) -> dict[tuple[str, str], Callable[[], None]]:
    """Return a step and a forward in each precision."""
    pixels = torch.randint(256, (images, 3, size, size), dtype=torch.uint8)
    labels = torch.zeros(images).long()
    student = copy.deepcopy(model).train()
    by_name = {}
    for precision in ("fp32", "bf16"):
        frozen = copy.deepcopy(model).eval().requires_grad_(False)
        frozen.network.to(torch.bfloat16 if precision == "bf16" else torch.float32)

        def step(half: bool = precision == "bf16") -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                logits = student(pixels).logits
            nn.functional.cross_entropy(logits.float(), labels).backward()
            student.zero_grad()

        def forward(frozen: Classifier = frozen) -> None:
            with torch.inference_mode():
                frozen(pixels)

        by_name["step", precision] = step
        by_name["forward", precision] = forward
    return by_name


def units() -> str:
    """Return which of the processor's units multiply bfloat16."""
    flags = next(
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("flags")
    )
    return "+".join(sorted(BF16_FLAGS & set(flags.split()))) or "none"


assert kd.__version__


def main() -> None:
    """Time all networks and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    rows = []
    for threads, (name, (model, args, size, images)) in itertools.product(
        options.threads, NETWORKS.items()
    ):
        torch.set_num_threads(threads)
        model_of_size = built(model, args, size)
        convolved, depthwise = convolution_shares(model_of_size)
        all_works = works(model_of_size, size, images)
        spent = {}
        for number in range(options.rounds + 1):
            for key, work in all_works.items():
                wall = time.perf_counter()
                cpu_begin = time.process_time()
                work()
                if number:  # the first one sets up
                    milliseconds = (
                        1000 * (time.process_time() - cpu_begin),
                        1000 * (time.perf_counter() - wall),
                    )
                    spent.setdefault(key, []).append(milliseconds)
        for (measured, precision), milliseconds in spent.items():
            cpu, wall = (
                statistics.median(column) for column in zip(*milliseconds, strict=True)
            )
            row = {
                "network": name,
                "pixels": size,
                "images": images,
                "convolved": f"{convolved:.3f}",
            }
            row |= {
                "depthwise": f"{depthwise:.3f}",
                "units": units(),
                "threads": threads,
                "what": measured,
            }
            row |= {
                "precision": precision,
                "cpu_ms": round(cpu, 1),
                "ms": round(wall, 1),
            }
            rows.append({**row, "load": round(os.getloadavg()[0], 1)})
            print(rows[-1], flush=True)
        write(
            "precision",
            f"python benchmarks/precision.py --rounds {options.rounds}",
            rows,
        )


if __name__ == "__main__":
    main()
