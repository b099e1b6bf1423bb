"""The tensors of protocol version 2: lists to pixels, and everything else refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kd.serve import v2
from kd.serve.bodies import parse_json
from kd.serve.problems import Problem

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 4), np.uint8)
TENSOR = {"name": "image", "datatype": "UINT8", "shape": [2, 3, 4, 4]}


@pytest.mark.parametrize("data", [PIXELS.tolist(), PIXELS.ravel().tolist()])
def test_numbers(data):
    found, wanted = v2._tensor({"inputs": [{**TENSOR, "data": data}]}, 4, ("logits",), 2)
    assert wanted == ("logits",)
    assert found.dtype == np.uint8
    assert np.array_equal(found, PIXELS)


def with_first(value: object) -> list:
    return [value, *PIXELS.ravel().tolist()[1:]]


@pytest.mark.parametrize(
    "data",
    [
        None, 7, "x" * 96, {}, [], [[]], [[], []], with_first("1"), with_first("x" * 100_000), with_first(True),
        with_first(None), with_first(-1), with_first(256), with_first(10**30), with_first(1.0), with_first([0]),
        PIXELS.ravel().tolist()[1:], PIXELS.tolist()[:1], PIXELS.reshape(2, 48).tolist(),
        PIXELS.transpose(1, 0, 2, 3).tolist(), [PIXELS[0].tolist(), 3],
    ],
)  # fmt: skip
def test_what_is_no_tensor(data):
    with pytest.raises(Problem, match="whole numbers from 0 to 255") as caught:
        v2._tensor({"inputs": [{**TENSOR, "data": data}]}, 4, ("logits",), 2)
    assert caught.value.status == 400


@pytest.mark.parametrize("outputs", [True, 1, "logits", {"name": "logits"}, ["logits"], [{}], [{"name": ["logits"]}]])
def test_outputs(outputs):
    with pytest.raises(Problem, match="`logits`") as caught:
        v2._tensor({"inputs": [{**TENSOR, "data": PIXELS.tolist()}], "outputs": outputs}, 4, ("logits",), 2)
    assert caught.value.status == 400


def test_identities():
    assert v2._identity({}) is None
    assert v2._identity({"id": "\ud800"}) == "\ud800"
    for wrong in (7, ["x"], "x" * 257):
        with pytest.raises(Problem, match="`id`"):
            v2._identity({"id": wrong})


@pytest.mark.parametrize("size", [16, 224])
def test_the_largest_request_is_parsed_and_one_more_image_is_not(size):
    """Numbers may be flat or nested; both fit, and nothing much larger does."""
    for tensor in (np.zeros((2, 3, size, size), int), np.zeros(2 * 3 * size * size, int)):
        body = json.dumps({"inputs": [{"name": "image", "shape": [2, 3, size, size], "data": tensor.tolist()}]})
        assert parse_json(body.encode(), v2._values(size, 2))
        with pytest.raises(Problem) as caught:
            parse_json(body.encode(), v2._values(size, 1) - 1000)
        assert caught.value.status == 413
