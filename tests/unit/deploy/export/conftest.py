"""Small students by hand: see `subjects`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from subjects import small_subject

from kd.deploy.export.graphs import Subject


@pytest.fixture
def subject(tmp_path) -> Callable[..., Subject]:
    """Return what an export is made of; see `small_subject`."""
    return partial(small_subject, tmp_path)
