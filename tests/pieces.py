"""What tests of several folders build from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def tiny(depth: int = 1, width: int = 24) -> dict[str, Any]:
    """A ViT that a step of costs a millisecond."""
    return {
        "model": "vit_tiny_patch16_224",
        "args": {"patch_size": 8, "embed_dim": width, "depth": depth, "num_heads": 2},
        "attention": "unfused",
    }


def without_clocks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of metrics without what a clock told."""
    clocks = ("seconds", "images_per_second", "step_ms", "data_wait")
    return [{k: v for k, v in row.items() if k not in clocks and not k.startswith("ms_")} for row in rows]


def listing(folder: Path) -> list[str]:
    """Every file below a folder."""
    return sorted(os.path.relpath(path, folder) for path in folder.rglob("*") if path.is_file())
