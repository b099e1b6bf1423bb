"""What tests of several folders build from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def tiny(depth: int = 1, width: int = 24) -> dict[str, Any]:
    """A ViT that a step of costs a millisecond."""
    return {
        "model": "vit_tiny_patch16_224",
        "args": {"patch_size": 8, "embed_dim": width, "depth": depth, "num_heads": 2},
        "attention": "unfused",
    }


def listing(folder: Path) -> list[str]:
    """Every file below a folder."""
    return sorted(os.path.relpath(path, folder) for path in folder.rglob("*") if path.is_file())


class Asks(torch.nn.Module):
    """A network that looks at its input's values: no tracer and no exporter can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.mean((2, 3)) * self.weight if image.sum().item() > 0 else image.amax((2, 3))
