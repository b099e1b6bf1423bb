"""int8: what it loses, and what is left in float32."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from kd.core.host import installed
from kd.core.intervals import paired_interval, wilson_interval
from kd.deploy.export.export import write
from kd.deploy.export.flags import ExportOptions
from kd.deploy.export.parity import EAGER, GraphOutputs, compare, eager_runner
from kd.deploy.export.variants import quality
from kd.deploy.verify.comparison import RIGHT
from kd.deploy.verify.verify import VerifyOptions, verify
from kd.models import runtimes
from kd.models.classifier import Classifier
from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.parts import registry
from kd.parts.exporters import openvino
from kd.parts.exporters.openvino import STATIC
from kd.parts.tasks.single_label import SingleLabel

NNCF = pytest.mark.skipif(
    not (installed("nncf") and installed("openvino")), reason="needs the extra nncf"
)
# times the other channels: eight bits that hold both have nothing left for the others
OUTLIERS = 1000.0
SIZE = 16
VIT = {"patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
PIXELS = np.random.default_rng(0).integers(0, 256, (64, 3, SIZE, SIZE), np.uint8)


def images(limit: int = 0):
    """Images that nobody labelled: PyTorch's answers are right."""
    yield PIXELS, np.full(len(PIXELS), -1)


def student(
    outliers: bool = False, name: str = "vit_tiny_patch16_224", args: dict = VIT
) -> Classifier:
    """Random weights; with `outliers` the same answers from two channels a thousand
    times as large as the others.
    """
    torch.manual_seed(0)
    model = load(
        Spec("student", name, args, ["apple", "fig", "pear"], free_size=not args), SIZE
    ).eval()
    with torch.no_grad():
        # logits that differ by more than eight bits round
        model.network.get_classifier().weight *= 30
        if outliers:
            for tensor in (model.network.norm.weight, model.network.norm.bias):
                tensor[:2] *= OUTLIERS
            model.network.head.weight[:, :2] /= OUTLIERS
    return model


@NNCF
def test_smoothquant_holds_where_dynamic_int8_does_not(tmp_path):
    model = student(outliers=True)
    runtimes.write_onnx(runtimes.export_program(model, SIZE), tmp_path / "model.onnx")
    runtimes.write_int8(tmp_path / "model.onnx", tmp_path / "model.int8.onnx")
    openvino.post_training(tmp_path / "model.onnx", tmp_path / STATIC, images)
    runners = {
        "model.int8.onnx": runtimes.onnx_runner(tmp_path / "model.int8.onnx"),
        STATIC: runtimes.openvino_runner(tmp_path / STATIC, 1),
    }
    assert registry.exporter(STATIC).int8_share(tmp_path / STATIC) > 0.8
    compared = compare(eager_runner(model), runners, images())
    assert compared.drop("model.int8.onnx", SingleLabel()) > 0.2
    assert compared.drop(STATIC, SingleLabel()) <= 0.1


def test_the_interval_is_that_of_the_same_images():
    reference = torch.eye(4).repeat(5, 1)  # 20 images, answers 0 1 2 3 0 ...
    labels = reference.argmax(1)
    labels[0] = 3  # PyTorch is wrong here
    outputs = reference.clone()
    outputs[0] = torch.eye(4)[3]  # the graph is right where PyTorch is not,
    outputs[1:4] = torch.eye(4)[0]  # and wrong three times
    compared = GraphOutputs({EAGER: reference, "graph": outputs}, labels, [], {})
    assert compared.drop("graph", SingleLabel()) == pytest.approx(0.1)
    assert compared.drop_interval("graph", SingleLabel()) == paired_interval(3, 1, 20)


@pytest.mark.parametrize(
    ("labels", "facts", "decides", "interval", "drop", "drop_interval"),
    [
        (
            [0, 0, 1, 1, *[-1] * 6],  # PyTorch is right twice, the graph once
            {"same_top1": 5, "labelled": 4, "correct": 1, "accuracy": 0.25},
            ("accuracy", 0.25),
            wilson_interval(0.25, 4),
            0.25,
            paired_interval(2, 1, 4),
        ),
        (
            [-1] * 10,
            {"same_top1": 5, "labelled": 0},
            ("as trained", 0.5),
            wilson_interval(0.5, 10),
            0.5,
            paired_interval(5, 0, 10),
        ),
    ],
)
def test_only_labelled_images_are_right_or_wrong(
    labels, facts, decides, interval, drop, drop_interval
):
    """PyTorch answers 0 to each of ten images, the graph 1 to the images 0, 1, 2, 4 and
    5.
    """
    outputs = torch.eye(2)[[1, 1, 1, 0, 1, 1, 0, 0, 0, 0]]
    both = {EAGER: torch.eye(2)[[0] * 10], "graph": outputs}
    task = SingleLabel()
    compared = GraphOutputs(both, torch.tensor(labels), [], {"graph": 1.0})
    assert compared.scores("graph", task).facts == facts
    assert compared.drop_interval("graph", task) == drop_interval
    described = quality("graph", compared, task)
    assert (
        described["title"],
        described["score"],
        described["unit"],
        described["interval"],
    ) == (
        *decides,
        "%",
        interval,
    )
    assert (described["drop"], described["agreement"], described["images"]) == (
        drop,
        0.5,
        10,
    )


def test_dynamic_int8_leaves_convolutions_as_they_are(tmp_path):
    torch.manual_seed(0)
    model = load(
        Spec("student", "test_resnet", {}, ["a", "b"], free_size=True), 32
    ).eval()
    runtimes.write_onnx(runtimes.export_program(model, 32), tmp_path / "model.onnx")
    runtimes.write_int8(tmp_path / "model.onnx", tmp_path / "model.int8.onnx")
    weights = {
        name: tensor.numel()
        for name, tensor in model.network.named_parameters()
        if tensor.ndim > 1
    }
    linear = sum(count for name, count in weights.items() if name.startswith("fc"))
    exporter = registry.exporter("model.int8.onnx")
    assert exporter.int8_share(tmp_path / "model.onnx") == 0
    assert exporter.int8_share(tmp_path / "model.int8.onnx") == pytest.approx(
        linear / sum(weights.values()), abs=0.01
    )


@pytest.mark.parametrize("name", ["test_resnet", "vit_tiny_patch16_224"])
def test_log_and_card_state_a_small_share_of_int8_weights(name, subject, tmp_path):
    """The card was silent on a MobileNetV3 of which 0.3 % became int8."""
    args = VIT if name.startswith("vit") else {}
    exported = write(
        subject(student=student(name=name, args=args)),
        tmp_path / "export",
        ExportOptions(int8=True),
    )
    share = exported.manifest["parity"]["model.int8.onnx"]["int8_share"]
    assert "int8_share" not in exported.manifest["parity"]["model.onnx"]
    (line,) = [line for line in exported.lines if line.startswith("model.int8")]
    card = (tmp_path / "export" / "README.md").read_text()
    said = f"{100 * share:.1f} % of the weights are int8"
    assert (said in line, said in card) == ((share < 0.5,) * 2)
    assert (share < 0.5) == (name == "test_resnet")
    rows = verify(VerifyOptions(export=tmp_path / "export")).rows
    (row,) = [row for row in rows if row.what == "parity/model.int8.onnx/int8_share"]
    assert row.verdict == RIGHT


@NNCF
@pytest.mark.slow
def test_nncf_reports_nothing():
    """Whether it may is read when it is imported, which must not be earlier than kd
    says no.
    """
    script = """
import sys
from kd.parts.exporters.openvino import _nncf
from kd.core.host import installed
assert installed("nncf")
assert "nncf" not in sys.modules
with _nncf():
    from nncf.telemetry import wrapper
print(isinstance(wrapper.telemetry, wrapper.NNCFTelemetryStub))
"""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("NNCF_")
    }
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert run.stdout.split() == ["True"], run.stderr


def test_each_graph_has_its_own_calibration_error():
    """Two images, one right: certain logits are off by half, even ones by nothing;
    PyTorch's are neither.
    """
    labels = torch.tensor([0, 1])
    certain = torch.tensor([[40.0, 0.0], [40.0, 0.0]])
    even = torch.tensor([[0.01, 0.0], [0.01, 0.0]])
    eager = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    compared = GraphOutputs(
        {EAGER: eager, "certain": certain, "even": even},
        labels,
        [],
        {"certain": 1.0, "even": 2.0},
    )
    assert compared.facts("certain", SingleLabel())["ece"] == pytest.approx(0.5)
    assert compared.facts("even", SingleLabel())["ece"] == pytest.approx(0.0, abs=0.01)
