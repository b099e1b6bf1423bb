"""The names that the README shows exist, and nothing beside them."""

import pytest

import kd


@pytest.mark.parametrize("name", kd.__all__)
def test_every_public_name_is_there(name):
    assert getattr(kd, name) is not None


def test_the_public_names():
    functions = {"distill", "load", "load_config", "region", "sweep", "train"}
    classes = {"BadImage", "Config", "Distilled", "Distiller", "KdError"}
    assert set(kd.__all__) == {"__version__"} | classes | functions
    assert set(kd._HOMES) | {"__version__"} == set(kd.__all__)


def test_a_shell_shows_the_public_names():
    assert set(kd.__all__) <= set(dir(kd))


def test_other_names_are_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'kd' has no attribute 'trian'"):
        kd.trian  # noqa: B018


def test_load_config_is_the_loader_of_the_commands():
    from kd.config import load

    assert kd.load_config is load
