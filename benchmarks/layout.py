"""Channels last in memory: a training step and a forward of convolutional networks,
against the plain layout.

Run: python benchmarks/layout.py [--size 64] [--batch 64] [--threads 1]

Each network is built twice with the same weights and takes its steps in turns under
bf16 autocast; CPU seconds, medians of five. `gain` is plain / channels last.
`convolved`, the share of weights in convolutions, decides in
kd/models/load_classifier.py.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import nn

from _record import write

SMALL = {"channels": [24, 48, 96, 192], "stem_width": 16}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet10t, 24 channels": ("resnet10t", SMALL),
    "resnet18": ("resnet18", {}),
    "regnety_002": ("regnety_002", {}),
    "efficientnet_b0": ("efficientnet_b0", {}),
    "mobilenetv3_small_100": ("mobilenetv3_small_100", {}),
    "repvit_m0_9": ("repvit_m0_9", {}),
    "fastvit_t8": ("fastvit_t8", {}),
    "convnext_atto": ("convnext_atto", {}),
    "xcit_nano_12_p8_224": ("xcit_nano_12_p8_224", {}),
    "mobilevit_xxs": ("mobilevit_xxs", {}),
}


def milliseconds(
    calls: dict[str, Callable[[], Any]], rounds: int = 5
) -> dict[str, float]:
    """Return the median CPU milliseconds of each call, made in turns after one that is
    not counted.
    """
    durations: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if number:
                durations[name].append(1000 * (time.process_time() - start))
    return {name: statistics.median(times) for name, times in durations.items()}


def run_one(name: str, size: int, batch: int) -> dict[str, Any]:
    """Measure one network and return its row."""
    model, args = NETWORKS[name]
    plain = timm.create_model(model, num_classes=10, **args)
    networks = {
        "plain": plain,
        "last": copy.deepcopy(plain).to(memory_format=torch.channels_last),
    }
    images = torch.randn(batch, 3, size, size)

    def step(network: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            logits = network.train()(images)
        logits.float().logsumexp(1).mean().backward()

    def forward(network: nn.Module) -> None:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            network.eval()(images)

    row: dict[str, Any] = {
        "network": name,
        "size": size,
        "batch": batch,
        "threads": torch.get_num_threads(),
    }
    convolved = sum(
        m.weight.numel() for m in plain.modules() if isinstance(m, nn.Conv2d)
    )
    row["convolved"] = round(convolved / sum(p.numel() for p in plain.parameters()), 2)
    for work, call in {"step": step, "forward": forward}.items():
        ms = milliseconds(
            {
                key: lambda network=network, call=call: call(network)
                for key, network in networks.items()
            }
        )
        row |= {f"{work}_{key}_ms": round(value, 1) for key, value in ms.items()}
        row[f"{work}_gain"] = round(ms["plain"] / ms["last"], 2)
    print(row, flush=True)
    return row


def main() -> None:
    """Measure all networks and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--only", nargs="*", default=list(NETWORKS), choices=list(NETWORKS)
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [run_one(name, options.size, options.batch) for name in options.only]
    write(
        "layout",
        f"python benchmarks/layout.py --size {options.size} --threads"
        f" {options.threads}",
        rows,
    )


if __name__ == "__main__":
    main()
