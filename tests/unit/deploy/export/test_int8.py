"""int8: the first way that holds is written, and what is missing or lost is said."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from kd.core.errors import MissingExtra, ModelError
from kd.core.intervals import paired
from kd.deploy.export import int8
from kd.deploy.export.int8 import DYNAMIC, STATIC, Exam, Rung
from kd.deploy.export.variants import LEAST_INT8
from kd.models import runtimes
from kd.models.classifier import Classifier
from kd.models.load import load
from kd.models.spec import Spec
from kd.parts.tasks.single_label import SingleLabel

NNCF = pytest.mark.skipif(
    not (runtimes.installed("nncf") and runtimes.installed("openvino")), reason="needs the extra nncf"
)
OUTLIERS = 1000.0  # times the other channels: eight bits that hold both have nothing left for the others
SIZE = 16
VIT = {"patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
PIXELS = np.random.default_rng(0).integers(0, 256, (64, 3, SIZE, SIZE), np.uint8)


def images(limit: int = 0):
    """Images that nobody labelled: PyTorch's answers are right."""
    yield PIXELS, np.full(len(PIXELS), -1)


def student(outliers: bool = False, name: str = "vit_tiny_patch16_224", args: dict = VIT) -> Classifier:
    """Random weights; with `outliers` the same answers from two channels a thousand times as large as the others."""
    torch.manual_seed(0)
    made = load(Spec("student", name, args, ["apple", "fig", "pear"], free_size=not args), SIZE).eval()
    with torch.no_grad():
        made.network.head.weight *= 30  # logits that differ by more than eight bits round
        if outliers:
            for tensor in (made.network.norm.weight, made.network.norm.bias):
                tensor[:2] *= OUTLIERS
            made.network.head.weight[:, :2] /= OUTLIERS
    return made


@pytest.fixture
def examined(tmp_path):
    """Write model.onnx of a student; return the exam of its graphs."""

    def write(model: Classifier) -> Exam:
        runtimes.write_onnx(runtimes.export_program(model, SIZE), tmp_path / "model.onnx")
        return Exam.of(SingleLabel(), model, images)

    return write


def files(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_first_way_that_holds_is_written(examined, tmp_path):
    (rung,) = int8.climb(tmp_path, examined(student()), images, max_drop=0.2)
    assert (rung.name, rung.file, rung.title) == ("dynamic", DYNAMIC, "accuracy")
    assert rung.bytes == (tmp_path / DYNAMIC).stat().st_size < (tmp_path / "model.onnx").stat().st_size
    assert rung.drop == pytest.approx(1 - rung.agreement)
    assert rung.interval[0] <= rung.drop <= rung.interval[1]
    assert "int8, dynamic: accuracy " in rung.line()
    assert files(tmp_path) == {"model.onnx", DYNAMIC}


def test_the_interval_is_that_of_the_same_images():
    reference = torch.eye(4).repeat(5, 1)  # 20 images, answers 0 1 2 3 0 ...
    labels = reference.argmax(1)
    labels[0] = 3  # PyTorch is wrong here
    outputs = reference.clone()
    outputs[0] = torch.eye(4)[3]  # the graph is right where PyTorch is not,
    outputs[1:4] = torch.eye(4)[0]  # and wrong three times
    exam = Exam(SingleLabel(), lambda: [], reference, labels)
    assert exam.interval(outputs, 0.1) == paired(3, 1, 20)


@pytest.mark.parametrize(
    ("share", "drop", "holds"), [(1.0, 0.01, True), (1.0, 0.011, False), (LEAST_INT8 / 2, 0.0, False)]
)
def test_what_holds(share, drop, holds):
    rung = Rung("dynamic", DYNAMIC, "accuracy", 0.5, drop, (0.0, 0.1), 1.0, 1, share)
    assert rung.holds(0.01) is holds
    assert ("of the weights are int8" in rung.line()) == (share < LEAST_INT8)


@pytest.mark.parametrize("package", ["nncf", "openvino"])
def test_what_is_missing_is_one_line(package, examined, tmp_path, monkeypatch):
    exam = examined(student(outliers=True))
    for name in ("nncf", "openvino"):  # the other one counts as installed
        monkeypatch.setitem(sys.modules, name, None if name == package else sys)
    wanted = r"--int8: dynamic int8 loses .* at most 0\.5 are allowed \(--max-drop\), and post-training quantization "
    with pytest.raises(MissingExtra, match=rf"^{wanted}needs {package}, .*\. pip install 'kd\[nncf\]'\.$"):
        int8.climb(tmp_path, exam, images, max_drop=0.005)
    assert files(tmp_path) == {"model.onnx"}


@NNCF
def test_smoothquant_holds_where_dynamic_int8_does_not(examined, tmp_path):
    exam = examined(student(outliers=True))
    first, second = int8.climb(tmp_path, exam, images, max_drop=0.1)
    assert first.drop > 0.2
    assert (second.name, second.file) == ("post-training", STATIC)
    assert second.drop <= 0.1
    assert files(tmp_path) == {"model.onnx", STATIC, "openvino.int8.bin"}
    answers = runtimes.openvino_runner(tmp_path / STATIC, 1)(PIXELS)
    assert (answers.argmax(1) == exam.reference.argmax(1).numpy()).mean() == second.agreement


@NNCF
def test_both_files_stay_where_speeds_are_compared(examined, tmp_path):
    rungs = int8.climb(tmp_path, examined(student()), images, max_drop=0.2, both=True)
    assert [rung.file for rung in rungs] == [DYNAMIC, STATIC]
    assert {DYNAMIC, STATIC} < files(tmp_path)


@NNCF
def test_a_drop_that_nothing_holds_is_one_line(examined, tmp_path):
    wanted = (
        r"^--max-drop: no int8 graph holds it: on 64 validation images they lose dynamic .*, post-training .* points"
    )
    with pytest.raises(ModelError, match=wanted):
        int8.climb(tmp_path, examined(student()), images, max_drop=-2.0)


def test_dynamic_int8_does_not_hold_where_convolutions_stay_as_they_are(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = load(Spec("student", "lcnet_050", {}, ["a", "b"], free_size=True), 32).eval()
    runtimes.write_onnx(runtimes.export_program(model, 32), tmp_path / "model.onnx")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 3, 32, 32), np.uint8)
    exam = Exam.of(SingleLabel(), model, lambda: [(pixels, np.zeros(8, np.int64))])
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(MissingExtra, match=r"leaves convolutions in float32, .* % of the weights"):
        int8.climb(tmp_path, exam, images, max_drop=1.0)
    runtimes.write_int8(tmp_path / "model.onnx", tmp_path / DYNAMIC)
    weights = {name: one.numel() for name, one in model.network.named_parameters() if one.ndim > 1}
    linear = sum(count for name, count in weights.items() if name.startswith("classifier"))
    assert runtimes.int8_share(tmp_path / DYNAMIC) == pytest.approx(linear / sum(weights.values()), abs=0.01)


@NNCF
def test_nncf_reports_nothing():
    """Whether it may is read when it is imported, which must not be earlier than kd says no."""
    script = """
import sys
from kd.deploy.export.int8 import _nncf
from kd.models.runtimes import installed
assert installed("nncf")
assert "nncf" not in sys.modules
with _nncf():
    from nncf.telemetry import wrapper
print(isinstance(wrapper.telemetry, wrapper.NNCFTelemetryStub))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NNCF_")}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert run.stdout.split() == ["True"], run.stderr
