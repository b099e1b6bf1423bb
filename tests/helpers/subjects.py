"""Small students by hand, random weights: what an export makes of them needs no
training.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kd import config
from kd.core.host import installed
from kd.deploy.export import graphs, variants
from kd.deploy.export.graphs import Subject
from kd.models.classifier import digest
from kd.models.load_classifier import Spec, load
from kd.parts.exporters import openvino
from kd.setup.recipe import resolve

CLASSES = ("apple", "fig", "pear")
SIZE = 16
NAME = "vit_tiny_patch16_224"
VIT = {"patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 3, SIZE, SIZE), np.uint8)


def small_subject(
    folder: Path, run: str = "small", teacher: str = NAME, **changes: Any
) -> Subject:
    """Return what an export is made of; `changes`: other fields of the subject."""
    torch.manual_seed(0)
    student = load(Spec("student", NAME, VIT, CLASSES), SIZE).eval()
    with torch.no_grad():
        student.network.head.weight *= 30  # logits that differ by more than rounding
        labels = student.answer(torch.from_numpy(PIXELS)).argmax(1).numpy()
    settings = {
        "run": {"name": run, "folder": str(folder), "epochs": 1},
        "data": {"kind": "imagefolder", "root": str(folder), "image_size": SIZE},
        "teacher": {"model": teacher},
        "student": {"model": NAME},
        "losses": [{"kind": "kl"}],
    }

    def images(limit: int, training: bool = False):
        yield PIXELS[: limit or None], labels[: limit or None]

    fields = {
        "recipe": resolve(config.load(settings)),
        "student": student,
        "classes": CLASSES,
        "data": "0123456789abcdef",
        "provenance": {
            "run": run,
            "step": 3,
            "metrics": {},
            "digest": digest(student.network),
        },
        "origin": "trained from random initial weights",
        "images": lambda: nullcontext(images),
    }
    return Subject(**{**fields, **changes})


def measure_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure briefly, on one core, and as where OpenVINO is not installed."""
    monkeypatch.setattr(variants, "SECONDS", 0.01)
    monkeypatch.setattr(graphs, "cores", lambda: 1)
    monkeypatch.setattr(
        openvino, "installed", lambda name: name != "openvino" and installed(name)
    )
