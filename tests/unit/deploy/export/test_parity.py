"""Whether a graph computes what PyTorch computes: every answer the same, and no number that is none."""

from __future__ import annotations

import math

import pytest
import torch

from kd.core.errors import ModelError
from kd.deploy.export.parity import EAGER, GraphOutputs, check_exact
from kd.parts.tasks.single_label import SingleLabel

LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 1.00001], [0.5, 0.0, 0.4]])


def compared(graph: torch.Tensor) -> GraphOutputs:
    return GraphOutputs({EAGER: LOGITS, "model.onnx": graph}, torch.tensor([0, 2, 0]), [], {})


def test_the_difference_is_the_largest():
    graph = LOGITS.clone()
    graph[2, 1] -= 0.25
    assert compared(graph).difference("model.onnx") == 0.25
    assert compared(LOGITS).difference("model.onnx") == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_differs_without_end(value):
    graph = LOGITS.clone()
    graph[1, 0] = value
    assert compared(graph).difference("model.onnx") == math.inf


def test_another_answer_is_refused_however_small_the_difference():
    graph = LOGITS.clone()
    graph[1, 1] += 0.00002
    found = compared(graph)
    scores, difference = found.scores("model.onnx", SingleLabel()), found.difference("model.onnx")
    with pytest.raises(ModelError, match=r"^export\.onnx: .* and 1 of 3 answers"):
        check_exact("onnx", scores, difference, 1e-3, 3)
    check_exact("onnx", compared(LOGITS).scores("model.onnx", SingleLabel()), 0.0, 1e-3, 3)
