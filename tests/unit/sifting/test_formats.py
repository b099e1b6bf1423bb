"""Each batch format survives splitting and joining, or is refused with the error that
smart sifting documents.
"""

from collections import OrderedDict, UserDict, namedtuple

import numpy as np
import pytest
import torch

from kd.sifting import ListBatch, TensorBatch, UnsupportedDataFormatException
from kd.sifting.formats import DefaultTransform

Pair = namedtuple("Pair", "x y")
X = torch.arange(12.0).reshape(4, 3)
Y = torch.arange(4)
INDEX = torch.tensor([1, 3])
A = X[[1, 3]]
B = Y[[1, 3]]
SQUARE = torch.arange(16.0).reshape(4, 4)
TEXTS = ["a", "b", "c", "d"]

FORMATS = {
    "list of features": ([X, Y], None, [A, B]),
    "tuple of features": ((X, Y), None, (A, B)),
    "namedtuple": (Pair(X, Y), None, Pair(A, B)),
    "dict": ({"x": X, "y": Y}, None, {"x": A, "y": B}),
    "ordered dict": (OrderedDict(x=X, y=Y), None, OrderedDict(x=A, y=B)),
    "a mapping that is no dict": (UserDict(x=X, y=Y), None, UserDict(x=A, y=B)),
    "dict with constants": (
        {
            "x": X,
            "scale": 2.0,
            "task": "cola",
            "flag": True,
            "nothing": None,
            "t": torch.tensor(3),
        },
        None,
        {
            "x": A,
            "scale": 2.0,
            "task": "cola",
            "flag": True,
            "nothing": None,
            "t": torch.tensor(3),
        },
    ),
    "strings beside tensors": ([X, TEXTS], None, [A, ["b", "d"]]),
    "strings in a dict": ({"x": X, "text": TEXTS}, None, {"x": A, "text": ["b", "d"]}),
    "nested": ([{"a": X, "b": (X, Y)}, Y], None, [{"a": A, "b": (A, B)}, B]),
    "list of tensors in a dict": ({"x": [X, Y]}, None, {"x": [A, B]}),
    "one list a sample in a dict": (
        {"x": X, "boxes": [X[:1], X[:2], X[:3], X]},
        None,
        {"x": A, "boxes": [X[:2], X]},
    ),
    "arrays": ({"x": X.numpy(), "y": Y}, None, {"x": A.numpy(), "y": B}),
    "tensor": (X, None, A),
    "tensor of one dimension": (Y, None, B),
    "tensor, features first": (X.T, None, A.T),
    "square tensor": (torch.eye(4), 0, torch.eye(4)[[1, 3]]),
    "square tensor, features first": (SQUARE, 1, SQUARE[:, [1, 3]]),
    "list of samples": (
        [(X[i], Y[i]) for i in range(4)],
        None,
        [(X[1], Y[1]), (X[3], Y[3])],
    ),
    "list of dicts": (
        [{"x": X[i]} for i in range(4)],
        None,
        [{"x": X[1]}, {"x": X[3]}],
    ),
    "list of numbers": ([5, 6, 7, 8], None, [6, 8]),
    "as many samples as features": ([X, X, X, X], 1, [A, A, A, A]),
    "as many features as samples": (
        list(torch.eye(4)),
        0,
        [torch.eye(4)[1], torch.eye(4)[3]],
    ),
}


def same(first: object, second: object) -> bool:
    if isinstance(first, (torch.Tensor, np.ndarray)):
        return (
            type(first) is type(second)
            and bool((first == second).all())
            and first.shape == second.shape
        )
    if isinstance(first, (dict, UserDict)):
        return (
            type(first) is type(second)
            and list(first) == list(second)
            and all(same(first[k], second[k]) for k in first)
        )
    if isinstance(first, (list, tuple)):
        return (
            type(first) is type(second)
            and len(first) == len(second)
            and all(map(same, first, second))
        )
    return first == second


@pytest.mark.parametrize("name", FORMATS)
def test_samples_are_taken_in_every_format(name):
    batch, index, expected = FORMATS[name]
    transform = DefaultTransform(4, index, alone=False)
    sifting = transform.transform(batch)
    assert len(sifting) == 4
    assert same(transform.reverse_transform(sifting), batch)
    assert same(transform.reverse_transform(sifting.take(INDEX)), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_samples_are_joined_in_every_format(name):
    batch, index, _ = FORMATS[name]
    transform = DefaultTransform(4, index, alone=False)
    first = transform.transform(batch)
    second = transform.transform(batch)
    order = torch.arange(4)
    joined = first.take(order[:1]).join(
        [second.take(order[1:2]), first.take(order[2:])]
    )
    assert len(joined) == 4
    assert same(transform.reverse_transform(joined), batch)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({X, Y}, "batch: Batches of type <class 'set'> are not supported by default"),
        (
            X.numpy(),
            "Batches of type <class 'numpy.ndarray'> are not supported by default",
        ),
        ([], "Unable to index the batch of type <class 'list'>"),
        (torch.tensor(1.0), "Unable to index the batch of type <class 'torch.Tensor'>"),
        ({"x": 1}, "Unable to index the batch"),
        (
            {"x": X, "y": {1, 2}},
            "batch['y']: Unable to index the batch of type <class 'set'>",
        ),
        (
            [X[:3], Y[:3]],
            (
                "Batch size 4 does not match dimension 0 or dimension 1 sizes: they are"
                " 2 and 3"
            ),
        ),
        ({"x": X[:3]}, "Batch size 4 does not match dimension 0 or dimension 1 sizes"),
        (
            {"x": X, "y": Y[:2]},
            "batch['y']: Batch size 4 does not match dimension 0 or dimension 1 sizes",
        ),
        (
            X[:3, :2],
            (
                "Batch size 4 does not match dimension 0 or dimension 1 sizes: they are"
                " 3 and 2"
            ),
        ),
        (
            {"x": X, "corners": [X[:, :2]] * 4},
            "batch['corners']: holds 4 samples, or 4 features of 4 samples",
        ),
        ([X, X, X, X], "Both dimension 0 and dimension 1 match batch size 4"),
        (torch.eye(4), "batch_format_index"),
    ],
)
def test_other_formats_are_refused_with_the_documented_error(batch, message):
    with pytest.raises(UnsupportedDataFormatException) as caught:
        DefaultTransform(4, None, alone=False).transform(batch)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_later_batch_may_be_shorter():
    transform = DefaultTransform(4, None, alone=False)
    transform.transform([X, Y])
    last = transform.transform([X[:2], Y[:2]])
    assert (
        len(last) == 2
    )  # two features of two samples: only the first batch shows the sample dimension
    assert same(
        transform.reverse_transform(last.take(torch.tensor([1]))), [X[1:2], Y[1:2]]
    )


@pytest.mark.parametrize(("expected", "alone"), [(None, False), (32, True)])
def test_a_loader_may_have_no_known_batch_size(expected, alone):
    assert len(DefaultTransform(expected, None, alone).transform([X, Y])) == 4
    assert len(DefaultTransform(expected, None, alone).transform({"x": X, "k": 1})) == 4


def test_a_batch_that_changes_its_structure_is_refused():
    transform = DefaultTransform(4, None, alone=False)
    transform.transform({"x": X, "y": Y})
    with pytest.raises(UnsupportedDataFormatException, match="another structure"):
        transform.transform({"x": X})
    with pytest.raises(
        UnsupportedDataFormatException,
        match=r"Batch size .* does not match dimension 0",
    ):
        transform.transform({"x": X, "y": Y[:2]})


def test_a_constant_that_changes_is_refused_when_batches_are_joined():
    transform = DefaultTransform(4, None, alone=False)
    first, second = (
        transform.transform({"x": X, "task": task}) for task in ("cola", "sst2")
    )
    with pytest.raises(
        UnsupportedDataFormatException, match=r"batch\['task'\]: is one value"
    ):
        first.join([second])


def test_padding_to_the_longest_of_a_batch_is_refused():
    transform = DefaultTransform(4, None, alone=False)
    first = transform.transform({"x": X})
    second = transform.transform({"x": X[:, :2]})
    with pytest.raises(
        UnsupportedDataFormatException, match=r"shapes \(2,\), \(3,\).* Pad"
    ):
        first.join([second])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (TensorBatch(X, Y), [A, B]),
        (TensorBatch(X), [A]),
        (ListBatch(X.tolist(), Y.tolist()), [A.tolist(), B.tolist()]),
        (ListBatch(list(X)), [list(A)]),
    ],
)
def test_list_and_tensor_batches_are_taken_and_joined(batch, expected):
    assert len(batch) == 4
    assert type(batch.take(INDEX)) is type(batch)
    assert same(list(batch.take(INDEX)), expected)
    joined = batch.take(torch.tensor([1])).join([batch.take(torch.tensor([3]))])
    assert same(list(joined), expected)
    assert (joined.labels is None) == (batch.labels is None)


def test_inputs_and_labels_must_be_equally_many():
    with pytest.raises(UnsupportedDataFormatException, match="4 inputs and 2 labels"):
        TensorBatch(X, Y[:2])
