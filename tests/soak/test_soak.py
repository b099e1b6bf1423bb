"""The soak's table: what was not tried is lost, and not passed over."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TOOL = Path(__file__).parents[2] / "tools" / "soak.py"
UNTRIED = {
    "skipped": "import pytest\n\n@pytest.mark.skip\ndef test_one():\n    pass\n",
    "expected to fail": (
        "import pytest\n\n@pytest.mark.xfail\ndef test_one():\n    assert False\n"
    ),
    "left": (
        "import os\n\ndef test_one():\n    pass\n\ndef test_two():\n    os._exit(0)\n"
    ),
}


@pytest.fixture
def soak():
    spec = importlib.util.spec_from_file_location("soak", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", UNTRIED)
def test_a_group_without_a_tried_case_counts_as_lost(soak, tmp_path, monkeypatch, kind):
    (tmp_path / "test_untried.py").write_text(UNTRIED[kind])
    (tmp_path / "test_good.py").write_text("def test_one():\n    pass\n")
    groups = {
        name: soak.Group((str(tmp_path / f"test_{name}.py"),))
        for name in ("untried", "good")
    }
    monkeypatch.setattr(soak, "GROUPS", {**soak.GROUPS, **groups})
    monkeypatch.setattr(sys, "argv", ["soak.py", "good", "untried"])
    assert soak.main() == 1
    monkeypatch.setattr(sys, "argv", ["soak.py", "good"])
    assert soak.main() == 0
