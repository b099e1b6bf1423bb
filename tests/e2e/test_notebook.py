"""The notebook runs from its first cell to its last, in a kernel of its own."""

from __future__ import annotations

import os
import re

import pytest
from serving import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_cell_of_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    notebook = nbformat.read(ROOT / "examples" / "first_steps.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    texts = [
        str(output.get("text", output.get("data", {})))
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    ]
    printed = "\n".join(texts)
    student, alone = map(
        float,
        re.search(
            r"student: ([\d.]+)%, on the labels alone: ([\d.]+)%", printed
        ).groups(),
    )
    # 12 classes: chance is 8.3 %; what the page promises is a gain
    assert student > alone > 100 / 12
    assert "image/svg+xml" in printed
    assert "is predicted for" in printed


def test_the_notebook_is_committed_without_outputs():
    notebook = nbformat.read(ROOT / "examples" / "first_steps.ipynb", as_version=4)
    assert [cell for cell in notebook.cells if cell.get("outputs")] == []
