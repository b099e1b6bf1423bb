"""Which operators the time of a distillation step goes to, by torch's profiler.

Run: python benchmarks/operators.py [--teacher vit_base_patch16_224] [--batch 16] [--rounds 3] [--precision bf16]

The models, the batch and the parts of `mfu.py`. A row is one operator of one part: the time in itself without what it
calls, per step, the median of the rounds. On a GPU the time of the device.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from typing import Any

import torch
from mfu import Step, arguments, wait
from torch.profiler import ProfilerActivity, profile

from _record import write

LEAST = 0.005
"""Share of a part below which operators are summed as `others`."""


def profiled(step: Step, name: str, rounds: int) -> dict[str, list[tuple[float, int]]]:
    """Return by operator its milliseconds and calls in each round."""
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    work, gpu = step.works()[name], step.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    work()
    for _ in range(rounds):
        with profile(activities=activities) as profiler:
            work()
            wait(step.device)
        for row in profiler.key_averages():
            own = row.self_device_time_total if gpu else row.self_cpu_time_total
            found[row.key].append((own / 1000, row.count))
    return found


def main() -> None:
    """Profile, print the larger operators, write the CSV."""
    parser = arguments()
    parser.description = __doc__
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given.batch = given.batch or (256 if device.type == "cuda" else 16)
    rows: list[dict[str, Any]] = []
    for kernel in ("unfused", "fused"):
        step = Step(given, kernel, device)
        for name in ("teacher", "cached"):
            found = profiled(step, name, given.rounds)
            times = {key: statistics.median(ms for ms, _ in samples) for key, samples in found.items()}
            whole = sum(times.values())
            kept = {key: ms for key, ms in times.items() if ms > LEAST * whole}
            fixed = {"kernel": kernel, "work": name}
            part = [{**fixed, "operator": key, "calls": found[key][-1][1], "ms": ms} for key, ms in kept.items()]
            part.append({**fixed, "operator": "others", "calls": "", "ms": whole - sum(kept.values())})
            for row in sorted(part, key=lambda row: -row["ms"]):
                share = row["ms"] / whole
                print(f"{kernel:8s} {name:8s} {row['operator']:44s} {row['ms']:8.1f} ms {100 * share:5.1f} %")
                rows.append({**row, "ms": round(row["ms"], 2), "share": round(share, 4)})
    write("operators", " ".join(["python benchmarks/operators.py", *sys.argv[1:]]), rows)


if __name__ == "__main__":
    main()
