"""What tests of several folders build from."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from kd.core.types import State
from kd.files.pixels import HEIF

WITHOUT_HEIF = pytest.mark.skipif(HEIF, reason="pillow-heif is installed")
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
    """A whole configuration that leaves nothing to a measurement: same seed, same bits."""
    return {
        "run": {
            "name": "tiny",
            "folder": str(folder / "runs"),
            "epochs": 2,
            "every": {"log": 2},
        },
        "data": {
            "kind": "imagefolder",
            "root": str(photos),
            "image_size": 16,
            "batch_size": 8,
            "workers": 0,
        },
        "teacher": {
            **tiny(2, 48),
            "precision": "fp32",
            "fit": {"lr": 3e-3, "folder": str(folder / "teachers")},
        },
        "student": tiny(),
        "losses": [{"kind": "kl"}],
        "optimizer": {"lr": 2e-3},
        "backend": {"kind": "cpu", "precision": "fp32", "threads": 1},
    }


def fitted(folder: Path, epochs: int = 4) -> dict[str, Any]:
    """The section of a teacher that is fitted on the labels first, below a folder."""
    fit = {"epochs": epochs, "lr": 3e-3, "folder": str(folder)}
    return {**tiny(2, 48), "precision": "fp32", "min_accuracy": 0, "fit": fit}


def compared(photos: Path, teacher: Path, **sections: Any) -> dict[str, Any]:
    """A configuration for worlds and devices to compare, in batches of twelve images."""
    config = base(photos, photos)
    config["teacher"] = {**teacher_at(teacher), "min_accuracy": 0}
    config["run"] = {"name": "run"}
    config["losses"] = [
        {"kind": "kl", "temperature": 2.0},
        {"kind": "ce", "weight": 0.5},
    ]
    config["data"]["batch_size"] = 12
    backend = sections.pop("backend")
    return {**merged(config, sections), "backend": {"precision": "fp32", **backend}}


def with_tokenizer(folder: Path, texts: str) -> list[str]:
    """Write a tokenizer of one word a token for a CLIP, and return its words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", *dict.fromkeys(texts.split())]
    tokenizer = Tokenizer(
        WordLevel({word: id for id, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = Whitespace()
    ends = [("[BOS]", 1), ("[EOS]", 2)]
    tokenizer.post_processor = TemplateProcessing(
        single="[BOS] $A [EOS]", special_tokens=ends
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]"
    ).save_pretrained(folder)
    return words


class Trained(NamedTuple):
    """A finished run."""

    folder: Path
    world: Any = None
    """How its processes ended, where it had some of its own."""

    def rows(self, kind: str = "train") -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl of a kind."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows()]

    def manifest(self) -> dict[str, Any]:
        return json.loads((self.folder / "manifest.json").read_text())

    def checkpoint(self, step: int | None = None) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint, the newest if none is named."""
        folders = self.folder / "checkpoints"
        if step is None:
            folder = max(folders.glob("step_*"))
        else:
            folder = folders / f"step_{step:08d}"
        return load_file(folder / "tensors.safetensors")

    def ids(self, world_size: int, micros: int) -> list[list[int]]:
        """Return what each step was trained on, from the sifter's records of all ranks."""
        record = self.folder.with_suffix(".record")
        texts = [
            (record / f"rank_{rank}.jsonl").read_text() for rank in range(world_size)
        ]
        batches = [[json.loads(line) for line in text.splitlines()] for text in texts]
        return [
            [
                id
                for i in range(micros)
                for rank in range(world_size)
                for id in batches[rank][step * micros + i]
            ]
            for step in range(len(batches[0]) // micros)
        ]


def slow(*values: Any, id: str | None = None) -> Any:
    """A case of `parametrize` that runs in `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def teacher_at(teacher: Path) -> dict[str, Any]:
    """The section of a teacher that is there."""
    return {"model": str(teacher), "attention": "unfused", "precision": "fp32"}


def wait_until(
    condition: Callable[[], object],
    process: subprocess.Popen | None = None,
    seconds: float = 60,
) -> None:
    """Return when a condition is true; fail if it never is, or the process ends."""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.005)


def without_clocks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of metrics without what a clock told."""
    clocks = ("seconds", "cpu_seconds", "images_per_second", "step_ms", "data_wait")
    return [
        {k: v for k, v in row.items() if k not in clocks and not k.startswith("ms_")}
        for row in rows
    ]


class Ranks:
    """A backend as one rank of several sees it; `mean` turns this rank's tensor into
    the mean of all.
    """

    def __init__(
        self,
        backend: Any,
        world_size: int,
        mean: Callable[[Any], Any] = lambda tensor: tensor,
    ) -> None:
        self.backend = backend
        self.world_size = world_size
        self.reduce_mean = mean
        self.local_world_size = world_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


def timeless(state: State) -> State:
    """Return a state without what a clock told."""
    return replace(state, seconds=0.0, cpu_seconds=0.0)


def listing(folder: Path) -> list[str]:
    """Every file below a folder."""
    return sorted(
        os.path.relpath(path, folder) for path in folder.rglob("*") if path.is_file()
    )


class Asks(torch.nn.Module):
    """A network that looks at its input's values: no tracer and no exporter can
    follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return (
            image.mean((2, 3)) * self.weight
            if image.sum().item() > 0
            else image.amax((2, 3))
        )


def paint(folder: Path, per_class: Sequence[int], seed: int, size: int = 20) -> None:
    """Write noisy JPEG files, a class a colour, which a tiny ViT learns within seconds."""
    generator = np.random.default_rng(seed)
    for channel, (name, count) in enumerate(zip(CLASSES, per_class, strict=True)):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(0, 120, (size + number % 3, size, 3), np.uint8)
            pixels[..., channel] += 100
            Image.fromarray(pixels).save(
                folder / name / f"{number:02d}.jpg", quality=90
            )


def centre(path: Path, size: int = 16) -> np.ndarray:
    """Return an image's middle as evaluation sees it, uint8 [3, size, size], by Pillow."""
    image = Image.open(path).convert("RGB")
    side = min(image.size)
    x = (image.width - side) / 2
    y = (image.height - side) / 2
    box = (x, y, x + side, y + side)
    square = image.resize((size, size), Image.Resampling.BICUBIC, box=box)
    return np.asarray(square).transpose(2, 0, 1).copy()


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return `old` with `new` over it by section; a model's `args` are replaced."""
    result = copy.deepcopy(old)
    for key, value in new.items():
        are_sections = isinstance(value, dict) and isinstance(result.get(key), dict)
        if are_sections and key != "args":
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def write_tar(path: Path, members: Mapping[str, bytes | str], **options: Any) -> Path:
    """Write a tar file of members by name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            content = data.encode() if isinstance(data, str) else data
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
