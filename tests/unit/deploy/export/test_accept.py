"""`--accept`: what a sentence may say, the first graph that keeps it, and by how much the others miss."""

import json
import re

import pytest

from kd.core.errors import ModelError
from kd.deploy.export import graphs
from kd.deploy.export.export import write
from kd.deploy.export.options import ExportOptions, NotAcceptedError, limits, misses, sentence
from kd.deploy.serve.model import describe


def test_a_sentence():
    assert limits("drop<=2  ms<=5.5 mb<=4 ece<=0") == {"drop": 2.0, "ms": 5.5, "mb": 4.0, "ece": 0.0}
    assert sentence(" teacher-drop<=1.5  mb<=4 ") == "teacher-drop<=1.5 mb<=4"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ms<5", r"'ms<5' is not WORD<=NUMBER, such as"),
        ("ms <= 5", "'ms' is not WORD<=NUMBER"),
        ("ms<=fast", "is not WORD<=NUMBER"),
        ("ms<=nan", "is not WORD<=NUMBER"),
        ("ms<=1e9", "is not WORD<=NUMBER"),
        ("drop<=-1", "is not WORD<=NUMBER"),
        ("ms<=0", "'ms<=0' is no sense"),
        ("drop<=101", "'drop<=101' is no sense"),
        ("dorp<=1", "'dorp' is not one of drop, teacher-drop, ece, ms, mb"),
        ("mb<=1 mb<=2", "'mb' stands there twice"),
        ("  ", "an empty sentence"),
    ],
)
def test_what_is_no_sentence(text, told):
    with pytest.raises(ValueError, match=told):
        limits(text)


def test_by_how_much_a_graph_misses():
    found = {"drop": 2.5, "mb": 4.0, "ece": float("nan")}
    assert misses(found, {"drop": 2, "mb": 4, "ms": 1, "ece": 3}) == ["drop by 0.5 (2.5)", "ece by nan (nan)"]


def files(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.usefixtures("brief")
def test_the_first_graph_that_keeps_the_sentence_is_exported(subject, tmp_path):
    """model.onnx is too large, so that int8 is made, measured through kd-serve and loaded; the card says so."""
    float32 = write(subject(), tmp_path / "float32", ExportOptions(accept="drop<=0 ece<=100"))
    assert float32.manifest["accepted"]["file"] == "model.onnx"
    assert "model.int8.onnx" not in files(float32.folder)
    size = (float32.folder / "model.onnx").stat().st_size / 1e6
    text = f"drop<=20 ms<=10000 mb<={size - 0.005:.3f}"
    written = write(subject(), tmp_path / "export", ExportOptions(accept=text))
    accepted = json.loads((written.folder / "manifest.json").read_text())["accepted"]
    assert (accepted["sentence"], accepted["file"], accepted["threads"]) == (text, "model.int8.onnx", 1)
    assert 0 < accepted["found"]["ms"] <= 10000
    assert accepted["found"]["mb"] * 1e6 == pytest.approx((written.folder / "model.int8.onnx").stat().st_size, abs=51)
    assert describe(written.folder).file == "model.int8.onnx"
    assert {"model.onnx", "model.int8.onnx"} <= files(written.folder)
    assert f'accepted "{text}": model.int8.onnx with drop ' in (written.folder / "README.md").read_text()
    missed = re.search(r"not accepted: model.onnx misses mb by ([0-9.]+)", "\n".join(written.lines))
    assert missed
    assert float(missed[1]) == pytest.approx(0.005, abs=0.00105)  # the bound and the miss are rounded, to 0.001


@pytest.mark.usefixtures("brief")
def test_nothing_is_written_where_nothing_keeps_it(subject, tmp_path):
    with pytest.raises(NotAcceptedError) as raised:
        write(subject(), tmp_path / "export", ExportOptions(accept="mb<=0.001"))
    assert raised.value.exit_code == 3
    text = str(raised.value)
    assert text.startswith('--accept: nothing keeps "mb<=0.001". model.onnx misses mb by ')
    for name in ("model.int8.onnx misses mb by ", "openvino.xml: openvino is not installed"):
        assert name in text
    assert "\n" not in text
    assert not (tmp_path / "export").exists()


@pytest.mark.usefixtures("brief")
def test_a_graph_that_cannot_be_written_is_no_end(subject, tmp_path, monkeypatch):
    def fails(source, path):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(graphs.runtimes, "write_int8", fails)
    told = r"model\.int8\.onnx: cannot be written \(RuntimeError: no kernel\)"
    with pytest.raises(NotAcceptedError, match=told):
        write(subject(), tmp_path / "export", ExportOptions(accept="mb<=0.001"))


def test_against_the_teacher(subject, tmp_path):
    made = subject()
    with pytest.raises(ModelError, match="teacher-drop has nothing to compare with"):
        write(made, tmp_path / "export", ExportOptions(accept="teacher-drop<=1"))
    metrics = {"accuracy": 0.7, "teacher_accuracy": 0.75}
    made = subject(provenance={**made.provenance, "metrics": metrics})
    written = write(made, tmp_path / "export", ExportOptions(accept="teacher-drop<=6"))
    assert written.manifest["accepted"]["found"] == {"teacher-drop": pytest.approx(5.0)}
