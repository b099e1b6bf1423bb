"""Graphs compute what the classifier computes: any batch, any input size. Other
networks: tests/e2e/test_commands.
"""

import sys

import numpy as np
import onnx as onnx_package
import pytest
import torch
from pieces import Asks, slow

from kd.core.errors import MissingExtra, ModelError
from kd.deploy.export.parity import EAGER, GraphOutputs, require_exact
from kd.deploy.serve.engines import open_graph
from kd.models import runtimes as onnx
from kd.models.classifier import Classifier
from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.parts.tasks.single_label import SingleLabel

CLASSES = ("apple", "fig", "pear")
VIT = {"patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}


def student(name: str, args: dict, size: int, seed: int = 0) -> Classifier:
    torch.manual_seed(seed)
    return load(Spec("student", name, args, CLASSES), size).eval()


def pixels(count: int, size: int) -> np.ndarray:
    return np.random.default_rng(count).integers(
        0, 256, (count, 3, size, size), np.uint8
    )


@pytest.mark.parametrize(
    ("name", "args", "size"),
    [
        ("vit_tiny_patch16_224", VIT, 16),
        (
            "vit_tiny_patch16_224",
            {**VIT, "img_size": 24},
            37,
        ),  # the network is smaller than the data
        slow("vit_tiny_patch16_224", {**VIT, "img_size": 48}, 20),  # and larger
    ],
)
def test_every_graph_is_the_classifier(name, args, size, tmp_path):
    model = student(name, args, size)
    program = onnx.export_program(model, size)
    onnx.write_onnx(program, tmp_path / "model.onnx")
    torch.export.save(program, tmp_path / "model.pt2")
    written = onnx_package.load(tmp_path / "model.onnx")
    assert [entry.version for entry in written.opset_import if entry.domain == ""] == [
        onnx.OPSET
    ]
    assert [
        path.name
        for path in tmp_path.iterdir()
        if path.suffix == ".onnx" or "data" in path.name
    ] == ["model.onnx"]
    for run in (
        onnx.onnx_runner(tmp_path / "model.onnx"),
        open_graph(tmp_path / "model.pt2"),
    ):
        for count in (1, 2, 5):
            images = pixels(count, size)
            with torch.no_grad():
                expected = model(torch.from_numpy(images)).logits.numpy()
            assert np.abs(run(images) - expected).max() < 2e-5


def test_a_network_that_cannot_be_traced():
    with pytest.raises(
        ModelError,
        match=r"^student\.model: torch\.export cannot express this network .*--no-onnx",
    ):
        onnx.export_program(Classifier(Asks(), 3, 0), 8)


def test_a_package_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        MissingExtra,
        match=r"^--onnx: onnxruntime is not installed\. pip install onnxruntime, or",
    ):
        onnx.onnx_runner(tmp_path / "model.onnx")


def test_a_graphs_outputs_equal_pytorchs():
    reference = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    task = SingleLabel()
    outputs = {
        EAGER: reference,
        "model.onnx": reference + torch.tensor([[0.0, 0.0], [0.0, 2.5]]),
        "broken.onnx": torch.full((2, 2), torch.nan),
    }
    answers = GraphOutputs(outputs, torch.tensor([1, 1]), [], {})
    scores = answers.scores("model.onnx", task)
    assert scores.facts == {"same_top1": 1, "correct": 2, "accuracy": 1.0}
    assert (scores.changed, scores.score, scores.title) == (1, 1.0, "accuracy")
    assert answers.difference("model.onnx") == 2.5
    with pytest.raises(
        ModelError, match=r"differ from PyTorch's by up to 2\.5; 1 of 2 predictions"
    ):
        require_exact("model.onnx", scores, 2.5, 3.0, 2)
    broken = answers.scores("broken.onnx", task), answers.difference("broken.onnx")
    with pytest.raises(ModelError, match="by up to inf"):
        require_exact("broken.onnx", *broken, 1e9, 2)
    unlabelled = GraphOutputs(outputs, torch.tensor([-1, -1]), [], {}).scores(
        "model.onnx", task
    )
    # no accuracy: the same predictions decide
    assert unlabelled.facts == {
        "same_top1": 1,
        "labelled": 0,
    }
    assert (unlabelled.score, unlabelled.share_of) == (0.5, 2)
