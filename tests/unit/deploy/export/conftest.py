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
    base = subject()
    pixels = np.random.default_rng(5).integers(0, 256, (1200, 3, 16, 16), np.uint8)
    labels = base.student.answer(torch.from_numpy(pixels)).argmax(1).numpy()

    def images(limit, training=False):
        yield pixels[: limit or None], labels[: limit or None]

    base = replace(base, images=lambda: nullcontext(images))
    teacher = write(base, tmp_path / "teacher", ExportOptions(calibrate=False)).folder
    student = copy.deepcopy(base.student)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in student.network.parameters():
            parameter += 0.018 * torch.randn_like(parameter)
        right = (
            student.answer(torch.from_numpy(pixels)).argmax(1).numpy() == labels
        ).mean()
    assert 0.6 < right < 0.95
    metrics = {"accuracy": float(right), "teacher_accuracy": 1.0}
    provenance = {
        **base.provenance,
        "metrics": metrics,
        "digest": digest(student.network),
    }
    return (
        replace(base, student=student, provenance=provenance),
        teacher,
        pixels,
        labels,
    )
