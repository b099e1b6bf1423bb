"""An export with a self-check."""

from __future__ import annotations

from pathlib import Path

import pytest
from subjects import small_subject

from kd.deploy.export.export import write
from kd.deploy.export.flags import ExportOptions


@pytest.fixture(scope="session")
def honest(once) -> Path:
    """An export. Do not write into it."""

    def build(folder: Path) -> Path:
        write(
            small_subject(folder / "runs"), folder / "export", ExportOptions(int8=True)
        )
        return folder

    return once("self-checked", build) / "export"
