"""Small students by hand: see `subjects`."""

from collections.abc import Callable
from functools import partial

import pytest
from subjects import small_subject

from kd.deploy.export import graphs, variants
from kd.deploy.export.graphs import Subject
from kd.models import runtimes


@pytest.fixture
def subject(tmp_path) -> Callable[..., Subject]:
    """Return what an export is made of; see `small_subject`."""
    return partial(small_subject, tmp_path)


@pytest.fixture
def brief(monkeypatch) -> None:
    """Measure briefly, on one core, and as where OpenVINO is not installed."""
    monkeypatch.setattr(variants, "SECONDS", 0.01)
    monkeypatch.setattr(graphs, "cores", lambda: 1)
    find = runtimes.installed
    monkeypatch.setattr(runtimes, "installed", lambda name: name != "openvino" and find(name))
