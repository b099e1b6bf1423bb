"""Small students by hand: see `subjects`."""

from collections.abc import Callable
from functools import partial

import pytest
from subjects import measure_briefly, small_subject

from kd.deploy.export.graphs import Subject


@pytest.fixture
def subject(tmp_path) -> Callable[..., Subject]:
    """Return what an export is made of; see `small_subject`."""
    return partial(small_subject, tmp_path)


@pytest.fixture
def brief(monkeypatch) -> None:
    """Measure briefly, on one core, and as where OpenVINO is not installed."""
    measure_briefly(monkeypatch)
