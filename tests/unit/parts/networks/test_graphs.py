"""Thirty shapes of ONNX files: each answers as the arithmetic that it holds, or is
refused in one line.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from kd.core.errors import KdError
from kd.models.classifier import resized
from kd.models.spec import Spec
from kd.parts import registry

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
FLOAT = onnx.TensorProto.FLOAT
HALF = onnx.TensorProto.FLOAT16
DOUBLE = onnx.TensorProto.DOUBLE
BYTE = onnx.TensorProto.UINT8
INT = onnx.TensorProto.INT64
MEAN = (0.5, 0.4, 0.3)
STD = (0.2, 0.25, 0.3)
CLASSES = ("apple", "fig", "pear", "plum")


@dataclass(frozen=True)
class Shape:
    """A graph: mean of each channel over the places, times a matrix, with what
    differs.
    """

    size: tuple[Any, ...] = ("B", 3, 16, 16)
    type: int = FLOAT
    last: bool = False
    opset: int = 17
    ir: int = 8
    ends: tuple[str, ...] = ("logits",)
    softmax: bool = False
    inputs: int = 1
    reshape: tuple[int, ...] = ()
    widths: int = 4
    options: dict[str, Any] = field(default_factory=dict)


def weights(widths: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(3, widths)).astype(np.float32)


def write(shape: Shape, path) -> None:
    make = onnx.helper
    axes = [1, 2] if shape.last else [2, 3]
    nodes = []
    name = "image"
    if shape.type != FLOAT:
        nodes.append(make.make_node("Cast", [name], ["float"], to=FLOAT))
        name = "float"
    tensors = [onnx.numpy_helper.from_array(weights(shape.widths), "weights")]
    if shape.opset >= 18:
        tensors.append(onnx.numpy_helper.from_array(np.array(axes, np.int64), "axes"))
        nodes.append(make.make_node("ReduceMean", [name, "axes"], ["mean"], keepdims=0))
    else:
        nodes.append(
            make.make_node("ReduceMean", [name], ["mean"], axes=axes, keepdims=0)
        )
    product = "product" if shape.softmax or shape.reshape else shape.ends[0]
    nodes.append(make.make_node("MatMul", ["mean", "weights"], [product]))
    if shape.softmax:
        nodes.append(make.make_node("Softmax", [product], [shape.ends[0]], axis=1))
    if shape.reshape:
        tensors.append(
            onnx.numpy_helper.from_array(np.array(shape.reshape, np.int64), "sizes")
        )
        nodes.append(make.make_node("Reshape", [product, "sizes"], [shape.ends[0]]))
    nodes += [
        make.make_node("Identity", ["mean"], [output]) for output in shape.ends[1:]
    ]
    ins = [make.make_tensor_value_info("image", shape.type, shape.size)]
    ins += [
        make.make_tensor_value_info(f"more{i}", FLOAT, [1])
        for i in range(shape.inputs - 1)
    ]
    outs = [make.make_tensor_value_info(end, FLOAT, None) for end in shape.ends]
    graph = make.make_graph(nodes, "g", ins, outs, tensors)
    onnx.save(
        make.make_model(
            graph,
            opset_imports=[make.make_opsetid("", shape.opset)],
            ir_version=shape.ir,
        ),
        path,
    )


def load(shape: Shape, path, features=(), task="single_label", size=16, **spec_options):
    write(shape, path)
    values = {"mean": MEAN, "std": STD, **shape.options}
    options = registry.default_options(
        "networks", "onnx", **{k: v for k, v in values.items() if v is not None}
    )
    classes = () if features else CLASSES[: shape.widths]
    built = registry.build(
        "tasks", task, registry.default_options("tasks", task), "task.kind"
    )
    spec = Spec("teacher", str(path), {}, classes, task=built, **spec_options)
    return registry.build(
        "networks",
        "onnx",
        options,
        "teacher.kind",
        spec=spec,
        image_size=size,
        features=features,
    )


def expected(shape: Shape, image: torch.Tensor) -> torch.Tensor:
    """Return the answer in float64."""
    pixels = image.double()
    if shape.type != BYTE:
        mean, std = (
            torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1)
            for values in (MEAN, STD)
        )
        pixels = (pixels / 255 - mean) / std
    return pixels.mean((2, 3)) @ torch.from_numpy(weights(shape.widths)).double()


RAW = {"mean": None, "std": None}
ANSWERED = {
    "float32": Shape(),
    "float16": Shape(type=HALF),
    "uint8": Shape(type=BYTE, options=RAW),
    "channels last": Shape(size=("B", 16, 16, 3), last=True),
    "batch of 1": Shape(size=(1, 3, 16, 16)),
    "batch of 8": Shape(size=(8, 3, 16, 16)),
    "sides without a size": Shape(size=("B", 3, "H", "W")),
    "nothing has a size": Shape(size=(None, None, None, None)),
    "larger than the data": Shape(size=("B", 3, 24, 24)),
    "smaller than the data": Shape(size=("B", 3, 12, 12)),
    "input_size": Shape(size=("B", 3, "H", "W"), options={"input_size": 24}),
    "opset 11": Shape(opset=11, ir=6),
    "opset 18": Shape(opset=18),
    "one output of another name": Shape(ends=("probs_or_not",)),
    "logits and features": Shape(ends=("logits", "pooled")),
    "an output by name": Shape(ends=("scores", "pooled"), options={"output": "scores"}),
    "two classes": Shape(widths=2),
}
TOLERANCE = {HALF: 2e-3, FLOAT: 3e-6, BYTE: 2e-4}


@pytest.mark.parametrize("name", ANSWERED)
def test_a_graphs_output_equals_its_arithmetic(name, tmp_path):
    shape = ANSWERED[name]
    image = torch.randint(
        256, (5, 3, 16, 16), generator=torch.Generator().manual_seed(1)
    ).to(torch.uint8)
    model = load(shape, tmp_path / "g.onnx")
    pixels = resized(image, model.input_size)
    pixels = pixels.round() if shape.type == BYTE else pixels
    torch.testing.assert_close(
        model(image).logits.double(),
        expected(shape, pixels),
        rtol=1e-3,
        atol=TOLERANCE[shape.type],
    )


def test_two_numbers_of_threads_share_the_sessions_of_a_run(tmp_path, monkeypatch):
    model = load(Shape(), tmp_path / "g.onnx")
    opened = []
    threads = torch.get_num_threads()
    monkeypatch.setattr(
        "kd.parts.networks.onnx.open_session",
        lambda *arguments: opened.append(arguments[1]) or arguments[1],
    )
    try:
        for number in (
            threads + 1,
            threads,
            threads,
            threads + 1,
            threads,
            threads + 2,
        ):
            torch.set_num_threads(number)
            assert model.sessions() is not None
    finally:
        torch.set_num_threads(threads)
    assert opened == [threads + 1, threads + 2]


def test_probabilities_and_features_equal_the_graphs_arithmetic(tmp_path):
    image = torch.randint(256, (5, 3, 16, 16), dtype=torch.uint8)
    soft = Shape(softmax=True, options={"outputs": "probabilities"})
    probabilities = load(soft, tmp_path / "a.onnx")(image).logits.softmax(1)
    torch.testing.assert_close(
        probabilities.double(), expected(soft, image).softmax(1), rtol=1e-4, atol=1e-5
    )
    pooled = load(Shape(), tmp_path / "b.onnx", ("pooled",))(image).features["pooled"]
    torch.testing.assert_close(
        pooled.double(), expected(Shape(), image), rtol=1e-4, atol=1e-5
    )


REFUSED = {
    "float64": (Shape(type=DOUBLE), r"teacher\.model: .*takes image tensor\(double\)"),
    "int64": (Shape(type=INT), r"teacher\.model: .*takes image tensor\(int64\)"),
    "two inputs": (Shape(inputs=2), r"teacher\.model: .*takes image .*more0"),
    "two outputs, none named": (
        Shape(ends=("a", "b")),
        r"teacher\.output: .*has the outputs a, b",
    ),
    "no such output": (
        Shape(options={"output": "none"}),
        r"teacher\.output: .*has the outputs logits",
    ),
    "four dimensions": (
        Shape(reshape=(0, -1, 1, 1)),
        r"teacher\.model: returns the shape 2x4x1x1",
    ),
    "probabilities called logits": (
        Shape(softmax=True),
        r"teacher\.outputs: is logits, but the outputs are prob",
    ),
    "sides that differ": (
        Shape(size=("B", 3, 8, 16)),
        r"teacher\.model: .*fails on images of 8x8 pixels",
    ),
    "one answer of two": (
        Shape(reshape=(1, -1)),
        r"teacher\.model: .*returns for two images the shape",
    ),
    "one class": (
        Shape(widths=1),
        r"teacher\.model: has 2 classes",
    ),  # one logit is that of the second of two
    "no mean": (Shape(options=RAW), r"teacher\.mean: is missing"),
    "mean of uint8": (
        Shape(type=BYTE),
        r"teacher\.mean: is set, but the graph takes uint8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_that_does_not_fit_is_one_line(name, tmp_path):
    shape, message = REFUSED[name]
    with pytest.raises(KdError, match=f"^{message}") as caught:
        load(shape, tmp_path / "g.onnx")
    assert "\n" not in str(caught.value)
