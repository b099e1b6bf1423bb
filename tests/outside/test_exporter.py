"""An export format is one file beside kd's: by its name it is written, compared, served
and verified.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from subjects import CLASSES, PIXELS, measure_briefly, small_subject

import kd
import kd.parts.exporters
from kd.core.errors import KdError
from kd.core.host import installed
from kd.deploy.export.export import write
from kd.deploy.export.flags import ExportOptions
from kd.deploy.serve.model import describe, load
from kd.deploy.verify.comparison import WRONG
from kd.deploy.verify.verify import VerifyOptions, verify
from kd.parts import registry


@pytest.fixture
def packed(monkeypatch):
    folder = Path(__file__).parent / "exporters"
    paths = (Path(__file__).parent / "site", Path(kd.__file__).parents[1])
    # of kd verify's child
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setattr(
        kd.parts.exporters, "__path__", [*kd.parts.exporters.__path__, str(folder)]
    )


def check(folder: Path, name: str, file: str) -> None:
    """Write a format beside model.onnx; what is served gives PyTorch's logits."""
    subject = small_subject(folder)
    options = ExportOptions(formats=name, calibrate=False)
    manifest = write(subject, folder / "export", options).manifest
    assert [*manifest["parity"]] == ["model.onnx", file]
    with torch.no_grad():
        expected = subject.student.answer(torch.from_numpy(PIXELS[:16])).numpy()
    model = load(describe(folder / "export", file), 1, 1)
    model.warm_up(1)
    model.check_itself()
    np.testing.assert_allclose(model.engine(PIXELS[:16]), expected, atol=1e-3)
    assert manifest["self_check"][file]["allowed"] > 0
    assert (
        kd.load(folder / "export", file)(PIXELS[0].transpose(1, 2, 0)).label
        == CLASSES[expected[0].argmax()]
    )


def test_a_format_is_one_file(packed, tmp_path):
    check(tmp_path, "packed", "model.packed")
    rows = verify(VerifyOptions(export=tmp_path / "export")).rows
    assert any("model.packed" in row.what for row in rows)
    assert [row for row in rows if row.verdict == WRONG and "packed" in f"{row}"] == []


def test_a_format_that_kd_does_not_know_is_no_graph(packed, tmp_path, monkeypatch):
    check(tmp_path, "packed", "model.packed")
    monkeypatch.undo()
    with pytest.raises(
        KdError, match=r"^--file: .* has no 'model\.packed'\. There is model\.onnx"
    ):
        describe(tmp_path / "export", "model.packed")


@pytest.mark.skipif(not installed("executorch"), reason="needs the package executorch")
def test_executorch_outputs_equal_pytorchs(tmp_path):
    check(tmp_path, "executorch", "model.pte")


@pytest.mark.skipif(installed("executorch"), reason="executorch is installed")
def test_a_missing_executorch_names_its_package(tmp_path):
    with pytest.raises(
        KdError,
        match=(
            r"^--formats executorch: executorch is not installed.*pip install"
            r" executorch"
        ),
    ):
        write(
            small_subject(tmp_path),
            tmp_path / "export",
            ExportOptions(formats="executorch"),
        )
    assert not (tmp_path / "export").exists()


def test_accept_skips_formats_that_no_endpoint_loads(tmp_path, monkeypatch):
    measure_briefly(monkeypatch)
    options = ExportOptions(pt2=True, accept="drop<=100 mb<=9", calibrate=False)
    manifest = write(small_subject(tmp_path), tmp_path / "export", options).manifest
    assert [*manifest["parity"]] == ["model.pt2", "model.onnx"]
    assert manifest["accepted"]["file"] == "model.onnx"


def test_an_unknown_format_is_one_line(tmp_path):
    with pytest.raises(
        KdError,
        match=r"^--formats: no part named 'executorsh' in exporters.*executorch",
    ):
        ExportOptions(formats="executorsh").require(small_subject(tmp_path).recipe.task)


def test_a_graph_has_one_exporter_and_an_order():
    graphs = registry.graphs()
    assert [*graphs][:3] == ["model.pt2", "model.onnx", "openvino.xml"]
    assert {graph.kind for graph in graphs.values()} == {*registry.names("exporters")}
    precisions = [graph.precision for graph in graphs.values()]
    assert precisions.count("float32") == 4
