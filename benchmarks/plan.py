"""Compare the plan's communication model with steps of 1, 2 and 4 gloo ranks on this machine.

    python benchmarks/plan.py --rounds 3

Each rank has one thread and an equal share of a global batch of 16 images. In one process group, in turns: a step
without reduction, DDP's step, and the all-reduce of the whole gradient alone. The plan predicts DDP's step as

    step without reduction + tail + max(0, all-reduce - tail - backward)

where `tail` is the last bucket's share (`kd.study.report.scaling.exposed_ms`). The step without reduction is
measured on all ranks at once, so that a busy machine slows both sides alike. Medians.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from _record import write
from kd.study.report.scaling import exposed_ms

BATCH, SIZE, STEPS = 16, 64, 6
RANKS = (1, 2, 4)
MODELS: dict[str, dict[str, Any]] = {"vit_tiny": {"depth": 4}, "wide": {"depth": 2, "embed_dim": 768, "num_heads": 12}}


def main() -> None:
    """Measure and write the CSV."""
    made = argparse.ArgumentParser()
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--worker", default="", help="used by this script itself: the model")
    given = made.parse_args()
    if given.worker:
        worker(given.worker)
        return
    rows = []
    for model in MODELS:
        found: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in RANKS}
        for _ in range(given.rounds):
            for ranks in RANKS:
                found[ranks].append(launch(model, ranks))
        medians = {
            ranks: {key: statistics.median(row[key] for row in many) for key in many[0]}
            for ranks, many in found.items()
        }
        rows += compared(model, medians)
    write("plan", f"python benchmarks/plan.py --rounds {given.rounds}", rows)


def compared(model: str, found: dict[int, dict[str, float]]) -> list[dict[str, object]]:
    """Return measured and predicted steps."""
    rows = []
    for ranks, row in found.items():
        exposed = exposed_ms(row["all_reduce"], row["mib"], row["backward"]) if ranks > 1 else 0.0
        predicted = row["alone"] + exposed
        rows.append(
            {
                "model": model,
                "ranks": ranks,
                "gradient_mib": round(row["mib"], 2),
                "step_without_reduction_ms": round(row["alone"], 2),
                "all_reduce_ms": round(row["all_reduce"], 2),
                "predicted_exposed_ms": round(exposed, 2),
                "predicted_step_ms": round(predicted, 2),
                "step_ms": round(row["step"], 2),
                "predicted/measured": round(predicted / row["step"], 3),
            }
        )
        print(rows[-1])
    return rows


def launch(model: str, ranks: int) -> dict[str, float]:
    """Run the worker under torchrun and return what rank 0 printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--worker", model], capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def worker(name: str) -> None:
    """Time steps of one rank among its world, and print medians on rank 0."""
    import timm

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", img_size=SIZE, num_classes=12, **MODELS[name])
    world = dist.get_world_size()
    module = DistributedDataParallel(copy.deepcopy(network)) if world > 1 else network
    gradient = torch.zeros(sum(p.numel() for p in network.parameters()))
    found: dict[str, list[float]] = {"alone": [], "backward": [], "step": [], "all_reduce": []}
    optimizers = [torch.optim.AdamW(one.parameters(), fused=True) for one in (network, module)]
    for _ in range(STEPS + 2):
        alone, backward = timed(network, optimizers[0], BATCH // world)
        step, _ = timed(module, optimizers[1], BATCH // world)
        for key, value in (("alone", alone), ("backward", backward), ("step", step), ("all_reduce", _reduce(gradient))):
            found[key].append(value)
    if dist.get_rank() == 0:
        medians = {key: statistics.median(values[2:]) for key, values in found.items()}
        print(json.dumps({**medians, "mib": gradient.numel() * 4 / 2**20}), flush=True)
    dist.destroy_process_group()


def timed(module: torch.nn.Module, optimizer: torch.optim.Optimizer, images: int) -> tuple[float, float]:
    """Return the milliseconds of a step on the slowest rank's clock, and of this rank's backward pass."""
    pixels, labels = torch.randn(images, 3, SIZE, SIZE), torch.zeros(images, dtype=torch.int64)
    dist.barrier()
    start = time.perf_counter()
    loss = torch.nn.functional.cross_entropy(module(pixels), labels)
    middle = time.perf_counter()
    loss.backward()
    backward = time.perf_counter() - middle
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()  # the slowest rank decides, with and without a reduction
    return 1000 * (time.perf_counter() - start), 1000 * backward


def _reduce(gradient: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    if dist.get_world_size() > 1:
        dist.all_reduce(gradient)
    return 1000 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
