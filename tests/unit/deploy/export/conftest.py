"""Small students by hand: see `subjects`."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from subjects import measure_briefly, small_subject

from kd.deploy.export.export import write
from kd.deploy.export.flags import ExportOptions
from kd.deploy.export.graphs import Subject
from kd.models.classifier import digest


@pytest.fixture
def subject(tmp_path) -> Callable[..., Subject]:
    """Return what an export is made of; see `small_subject`."""
    return partial(small_subject, tmp_path)


@pytest.fixture
def brief(monkeypatch) -> None:
    """Measure briefly, on one core, and as where OpenVINO is not installed."""
    measure_briefly(monkeypatch)


@pytest.fixture
def pair(subject, tmp_path):
    """A student that is often wrong where it is unsure, the export of a teacher that is
    right, and their images.
    """
    made = subject()
    pixels = np.random.default_rng(5).integers(0, 256, (1200, 3, 16, 16), np.uint8)
    labels = made.student.answer(torch.from_numpy(pixels)).argmax(1).numpy()

    def images(limit, training=False):
        yield pixels[: limit or None], labels[: limit or None]

    made = replace(made, images=lambda: nullcontext(images))
    teacher = write(made, tmp_path / "teacher", ExportOptions(calibrate=False)).folder
    student = copy.deepcopy(made.student)
    torch.manual_seed(1)
    with torch.no_grad():
        for one in student.network.parameters():
            one += 0.018 * torch.randn_like(one)
        right = (
            student.answer(torch.from_numpy(pixels)).argmax(1).numpy() == labels
        ).mean()
    assert 0.6 < right < 0.95
    metrics = {"accuracy": float(right), "teacher_accuracy": 1.0}
    provenance = {
        **made.provenance,
        "metrics": metrics,
        "digest": digest(student.network),
    }
    return (
        replace(made, student=student, provenance=provenance),
        teacher,
        pixels,
        labels,
    )
