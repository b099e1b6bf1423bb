"""What tests of several folders build from."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kd.parts.datasets._decode import HEIF

WITHOUT_HEIF = pytest.mark.skipif(HEIF, reason="pillow-heif is installed; test_what_is_said_without_pillow_heif")
"""For what is said where the extra heic is not installed."""
CLASSES = ("apple", "fig", "pear")


def tiny(depth: int = 1, width: int = 24) -> dict[str, Any]:
    """A ViT that a step of costs a millisecond."""
    return {
        "model": "vit_tiny_patch16_224",
        "args": {"patch_size": 8, "embed_dim": width, "depth": depth, "num_heads": 2},
        "attention": "unfused",
    }


def base(photos: Path, folder: Path) -> dict[str, Any]:
    """A whole configuration in which nothing is left to a measurement: same seed, same bits."""
    return {
        "run": {"name": "tiny", "folder": str(folder / "runs"), "epochs": 2, "every": {"log": 2}},
        "data": {"kind": "imagefolder", "root": str(photos), "image_size": 16, "batch_size": 8, "workers": 0},
        "teacher": {**tiny(2, 48), "precision": "fp32", "fit": {"lr": 3e-3, "folder": str(folder / "teachers")}},
        "student": tiny(),
        "losses": [{"kind": "kl"}],
        "optimizer": {"lr": 2e-3},
        "backend": {"kind": "cpu", "precision": "fp32", "threads": 1},
    }


def slow(*values: Any, id: str | None = None) -> Any:
    """A case of `parametrize` that runs in `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def given(teacher: Path) -> dict[str, Any]:
    """The section of a teacher that is there."""
    return {"model": str(teacher), "attention": "unfused", "precision": "fp32"}


def wait_until(condition: Callable[[], object], process: subprocess.Popen | None = None, seconds: float = 60) -> None:
    """Return when a condition is true; fail if it never is, or if the process ends before."""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.005)


def without_clocks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of metrics without what a clock told."""
    clocks = ("seconds", "images_per_second", "step_ms", "data_wait")
    return [{k: v for k, v in row.items() if k not in clocks and not k.startswith("ms_")} for row in rows]


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


def paint(folder: Path, per_class: Sequence[int], seed: int, size: int = 20) -> None:
    """Write noisy JPEG files, one class red, one green, one blue: a tiny ViT learns them within seconds."""
    generator = np.random.default_rng(seed)
    for channel, (name, count) in enumerate(zip(CLASSES, per_class, strict=True)):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(0, 120, (size + number % 3, size, 3), np.uint8)
            pixels[..., channel] += 100
            Image.fromarray(pixels).save(folder / name / f"{number:02d}.jpg", quality=90)


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return `old` with `new` laid over it, section by section; `args` belong to one model and are replaced."""
    result = copy.deepcopy(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict) and key != "args"
        result[key] = merged(result[key], value) if both else value
    return result


def write_tar(path: Path, members: Mapping[str, bytes | str], **options: Any) -> Path:
    """Write a tar file of members by name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members.items():
            info, content = tarfile.TarInfo(name), data.encode() if isinstance(data, str) else data
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def names(source: Any) -> list[str]:
    return [source.name(id) for id in range(len(source))]


def labels(source: Any) -> list[int]:
    return [source.label(id) for id in range(len(source))]


def png(color: int, kind: str = "PNG") -> bytes:
    """A picture of 4 x 4 pixels of one red."""
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (color, 0, 0)).save(buffer, kind)
    return buffer.getvalue()
