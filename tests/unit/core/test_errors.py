"""Errors: one line of three sentences, that survives the border of a process."""

import pickle

import pytest

from kd.core import errors
from kd.core.errors import ConfigError, ConfigErrors, DataError, KdError, did_you_mean

TREE = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, KdError)
]


def test_an_error_is_written_in_sentences():
    error = KdError("data.root", "is empty", "At least one image", "Check the path")
    assert str(error) == "data.root: is empty. At least one image. Check the path."
    assert (
        str(KdError("a", "wrong.", "", "Did you mean 'b'?"))
        == "a: wrong. Did you mean 'b'?"
    )
    assert str(KdError("a", " wrong! ")) == "a: wrong!"


@pytest.mark.parametrize(
    "allowed", ["none", "0, or data.loader: local", "'x' or 'y'", "s3://BUCKET/PREFIX"]
)
def test_bare_values_become_a_sentence(allowed):
    """`..., which do not share it. none. Set data.store=none.` is no sentence; a phrase
    of words stays as it is.
    """
    error = KdError("data.store", "is ram", allowed, "Set data.store=none")
    assert str(error) == f"data.store: is ram. Allowed: {allowed}. Set data.store=none."
    assert error.allowed == allowed  # what other messages quote


@pytest.mark.parametrize("cls", [cls for cls in TREE if cls is not ConfigErrors])
def test_errors_survive_pickling(cls):
    error = cls("data.root", "is empty", "At least one image", "Check the path")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error)
    fields = (again.config_path, again.wrong, again.allowed, again.remedy)
    assert fields == ("data.root", "is empty", "At least one image", "Check the path")
    assert cls.exit_code == 2


def test_several_errors_are_one_a_line():
    several = ConfigErrors([ConfigError("a", "wrong"), DataError("b", "missing")])
    assert str(several) == "a: wrong.\nb: missing."
    again = pickle.loads(pickle.dumps(several))
    assert str(again) == str(several)
    assert [type(error) for error in again.errors] == [ConfigError, DataError]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("wieght", "Did you mean 'weight'?"),
        ("xyz", ""),
        ("weight", "Did you mean 'weight'?"),
    ],
)
def test_a_near_miss_is_suggested(word, expected):
    assert did_you_mean(word, ["weight", "kind"]) == expected
