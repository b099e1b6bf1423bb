"""The notebook of docs/ runs from its first cell to its last, on a small folder with tiny lengths."""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path

import pytest
from serving import ROOT

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'kd[dev]'")
SMALL = 'FOLDER = "photos"\nFIT_EPOCHS, EPOCHS, SIZE, BATCH = 1, 1, 32, 12'
"""In the place of the notebook's first code cell."""


def printed(cell) -> str:
    """Return what a cell has printed, and its value."""
    texts = [one.get("text", "") or one.get("data", {}).get("text/plain", "") for one in cell.outputs]
    return "".join(texts)


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Execute a notebook in `tmp_path` and return it."""
    from nbclient import NotebookClient

    for name in ("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def execute(notebook):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Jupyter's own packages
            return NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()

    return execute


@pytest.mark.slow
def test_every_cell_runs(photos, tmp_path, kernel):
    notebook = nbformat.read(ROOT / "docs" / "tutorial.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells[0].source.startswith("FOLDER = "), "the first code cell has the sizes"
    cells[0].source = SMALL
    (tmp_path / "photos").symlink_to(photos)
    kernel(notebook)
    said = [printed(cell) for cell in cells]
    assert "| student, distilled" in said[2]
    assert (tmp_path / "runs" / "fruit" / "export" / "model.safetensors").is_file()
    assert "(36, 13)" in said[5]
    assert "<td>student</td>" in cells[6].outputs[-1]["data"]["text/html"]
    assert (tmp_path / "own" / "model.onnx").is_file()
    assert "model.onnx" in said[7]


def test_it_comes_executed():
    """Each cell has its number and no error, and shows nothing of the machine."""
    text = (ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8")
    cells = [cell for cell in nbformat.reads(text, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [
        one for cell in cells for one in cell.outputs if one.output_type == "error" or one.get("name") == "stderr"
    ]
    assert not re.search(r"(/tmp|/home|/root|/work)/", text)
