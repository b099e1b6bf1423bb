"""The folder is the registry: what a part must have, for each file that is there."""

import dataclasses
import inspect

import pytest

from kd.core.errors import PartNotFound
from kd.core.options import field_docs
from kd.parts import registry

PARTS = [
    (folder, name) for folder in registry.FOLDERS for name in registry.names(folder)
]
CONTEXT = {
    "tasks": ["options"],
    "losses": ["options", "dims"],
    "sifters": ["options", "context"],
    "datasets": ["options", "split", "classes", "labels"],
    "networks": ["options", "spec", "image_size", "features"],
    "backends": ["options", "precision", "timeout_seconds"],
    "exporters": ["options"],
}


@pytest.mark.parametrize(("folder", "name"), PARTS)
def test_a_part_has_options_and_build(folder, name):
    module = registry.find(folder, name, "here")
    options = module.Options
    assert options.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(options))
    assert field_docs(options).keys() == {
        field.name for field in dataclasses.fields(options)
    }
    assert list(inspect.signature(module.build).parameters) == CONTEXT[folder]
    assert registry.summary(module).endswith(".")


def test_private_modules_are_no_parts():
    assert not [name for _, name in PARTS if name.startswith("_")]
    with pytest.raises(PartNotFound, match="no part named '_decode' in datasets"):
        registry.find("datasets", "_decode", "data.kind")
