"""What torch.compile costs a student, and what it gains: training steps of nine
networks, eager and compiled in turns.

Run: python benchmarks/compile.py [--threads 1] [--only NAME ...]

Each network is compiled in a process of its own with an empty folder of libraries, then
once more in another process that finds them. Seconds are those of the first step, which
compiles forward and backward. bfloat16 where the processor has units for it. Unfused
attention, which `auto` takes on such processors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

ROUNDS = 7
NETWORKS: dict[str, tuple[str, int, int]] = {
    "residual_24": ("examples", 128, 32),
    "vit_tiny": ("vit_tiny_patch16_224", 16, 224),
    "vit_small": ("vit_small_patch16_224", 16, 224),
    "xcit_nano": ("xcit_nano_12_p16_224", 16, 224),
    "resnet18": ("resnet18", 16, 224),
    "convnext_atto": ("convnext_atto", 16, 224),
    "mobilenetv3_small": ("mobilenetv3_small_100", 32, 224),
    "efficientnet_b0": ("efficientnet_b0", 16, 224),
    "repvit_m0_9": ("repvit_m0_9", 16, 224),
}
"""What builds it, images of a step, pixels a side."""


def measure(name: str, threads: int) -> dict[str, Any]:
    """Compile one network in this process; return seconds of its first step and the
    speeds.
    """
    import timm
    import torch
    from timm_distillation import bf16_pays
    from torch.nn.functional import cross_entropy

    from examples.residual import network
    from kd.core.host import keep_freed_memory
    from kd.models.classifier import set_attention

    keep_freed_memory()
    torch.set_num_threads(threads)
    model, batch, size = NETWORKS[name]
    images = torch.randn(batch, 3, size, size)
    labels = torch.randint(10, (batch,))

    def student() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        built_network = (
            network(24)
            if model == "examples"
            else timm.create_model(model, num_classes=10)
        )
        set_attention(built_network, False)
        return built_network, torch.optim.AdamW(
            built_network.parameters(), lr=1e-3, fused=True
        )

    def seconds(
        network_to_time: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16_pays()):
            logits = network_to_time(images)
        cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    eager = student()
    compiled = student()
    compiled[0].compile(dynamic=False)
    seconds(*eager)
    first = seconds(*compiled)
    times = [(seconds(*eager), seconds(*compiled)) for _ in range(ROUNDS)]
    speeds = [batch / statistics.median(column) for column in zip(*times, strict=True)]
    ratio = statistics.median(a / b for a, b in times)
    return {
        "first": round(first, 1),
        "speeds": [round(speed, 1) for speed in speeds],
        "ratio": round(ratio, 3),
    }


def main() -> None:
    """Measure each network twice and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--only", nargs="*", default=list(NETWORKS), choices=list(NETWORKS)
    )
    parser.add_argument("--one", default="", help="measure one here and print it")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.threads)))
        return
    from _record import write

    rows = []
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="kd_compile_") as folder:
            argv = [
                sys.executable,
                __file__,
                "--one",
                name,
                "--threads",
                str(options.threads),
            ]
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
            cold, warm = (
                json.loads(
                    subprocess.run(
                        argv,
                        env=environment,
                        check=True,
                        capture_output=True,
                        text=True,
                    ).stdout
                )
                for _ in range(2)
            )
        eager, compiled = cold["speeds"]
        rows.append(
            {
                "network": name,
                "cold_seconds": cold["first"],
                "warm_seconds": warm["first"],
            }
        )
        rows[-1] |= {"eager_per_second": eager, "compiled_per_second": compiled}
        rows[-1] |= {"ratio": cold["ratio"], "ratio_again": warm["ratio"]}
        print(rows[-1], flush=True)
    write("compile", f"python benchmarks/compile.py --threads {options.threads}", rows)


if __name__ == "__main__":
    main()
