"""What a rank of `test_same_data.py` does: kd.distill on items that may differ between
the ranks.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import kd
from kd.cli.command import run_guarded


def main(argv: list[str]) -> int:
    images = torch.arange(24.0).reshape(12, 1, 1, 2) / 24
    labels = torch.arange(12) % 2
    if os.environ["RANK"] == "1" and argv == ["labels"]:
        labels[6] = 1 - labels[6]
    if os.environ["RANK"] == "1" and argv == ["missing"]:
        images = images[:-1]
        labels = labels[:-1]
    data = TensorDataset(images, labels)
    networks = [nn.Sequential(nn.Flatten(), nn.Linear(2, 2)) for _ in range(2)]
    backend = {"kind": "cpu", "threads": 1, "timeout_seconds": 20}

    def command() -> None:
        kd.distill(
            teacher=networks[0],
            student=networks[1],
            train=data,
            val=data,
            steps=2,
            batch_size=4,
            backend=backend,
        )

    return run_guarded(command)
