"""Compare the plan's communication model with steps of 1, 2 and 4 gloo ranks on this machine.

    python benchmarks/plan.py --rounds 3

Each rank has one thread and an equal share of a global batch of 32 images. A rank alone is measured with all shares, which
gives the line `fixed + image x images`. Its step on N ranks on C cores is predicted as

    max(1, N / C) x (fixed + image x 32 / N) + exposed all-reduce

The all-reduce of the gradient alone is measured between the ranks; what the backward pass hides of it follows the formula of
`kd.report.plan`. Rounds are interleaved; medians. Neighbours on the machine change the times, and the ratio less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from _record import write
from torch.nn.parallel import DistributedDataParallel

from kd.host import cores
from kd.report.plan import exposed_ms
from kd.setup.estimate import line_through

BATCH, SIZE, STEPS = 32, 64, 6
RANKS = (1, 2, 4)
MODELS = {"vit_tiny": {"depth": 4}, "wide": {"depth": 2, "embed_dim": 768, "num_heads": 12}}


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
        rows += compared(model, {n: {k: statistics.median(r[k] for r in many) for k in many[0]} for n, many in found.items()})
    write("plan", f"python benchmarks/plan.py --rounds {given.rounds}", rows)


def compared(model: str, found: dict[int, dict[str, float]]) -> list[dict[str, object]]:
    """Return measured and predicted steps; the prediction uses steps of a single rank and the all-reduce alone."""
    one, rows = found[1], []
    fixed, image = line_through(BATCH // 4, one["share_4"], BATCH, one["share_1"])
    for ranks, row in found.items():
        crowd = max(1.0, ranks / cores())
        compute = crowd * (fixed + image * BATCH / ranks)
        exposed = exposed_ms(row["all_reduce"], one["mib"], crowd * one["backward"] / ranks) if ranks > 1 else 0.0
        predicted = compute + exposed
        rows.append(
            {
                "model": model,
                "ranks": ranks,
                "gradient_mib": round(one["mib"], 2),
                "step_ms": round(row["step"], 2),
                "all_reduce_ms": round(row["all_reduce"], 2),
                "predicted_compute_ms": round(compute, 2),
                "predicted_exposed_ms": round(exposed, 2),
                "predicted_step_ms": round(predicted, 2),
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
    module = DistributedDataParallel(network) if world > 1 else network
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    gradient = torch.zeros(sum(p.numel() for p in network.parameters()))
    found = {"mib": gradient.numel() * 4 / 2**20, "all_reduce": 0.0}
    found["step"], found["backward"] = timed(module, optimizer, BATCH // world)
    if world > 1:
        found["all_reduce"] = statistics.median(_all_reduce(gradient) for _ in range(STEPS))
    else:
        found["share_1"], found["share_4"] = found["step"], timed(module, optimizer, BATCH // 4)[0]
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def timed(module: torch.nn.Module, optimizer: torch.optim.Optimizer, images: int) -> tuple[float, float]:
    """Return the median milliseconds of a step, and of its backward pass."""
    pixels, labels = torch.randn(images, 3, SIZE, SIZE), torch.zeros(images, dtype=torch.int64)
    steps, backwards = [], []
    for _ in range(STEPS + 2):
        dist.barrier()
        start = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(module(pixels), labels)
        middle = time.perf_counter()
        loss.backward()
        backwards.append(1000 * (time.perf_counter() - middle))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(1000 * (time.perf_counter() - start))
    return statistics.median(steps[2:]), statistics.median(backwards[2:])


def _all_reduce(gradient: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(gradient)
    return 1000 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
