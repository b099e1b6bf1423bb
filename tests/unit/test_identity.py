"""What is kept under which name: a fitted teacher, its cache, a store of pixels, a run folder."""

from __future__ import annotations

import pytest

from kd import config
from kd.jobs.teach import fit_key
from kd.setup.recipe import Recipe


SETTINGS = {
    "run": {"name": "tiny"},
    "data": {"kind": "imagefolder", "root": "photos", "batch_size": 8},
    "teacher": {"model": "vit_tiny_patch16_224"},
    "student": {"model": "vit_tiny_patch16_224"},
    "losses": [{"kind": "kl"}],
    "backend": {"kind": "cpu"},
}


def fitted(*overrides) -> str:
    """Return the key of the teacher that a configuration has fitted."""
    loaded = config.load(SETTINGS, ["teacher.fit.epochs=1", *overrides])
    return fit_key(Recipe(Recipe(loaded).fits["teacher"]), "photos")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("teacher.args={drop_rate: 0.5}", "teacher.args={drop_path_rate: 0.5}"),
        ("teacher.fit.evaluate=0", "teacher.fit.evaluate=1"),
        ("teacher.fit.lr=0.05", "teacher.fit.warmup=0.05"),
    ],
)
def test_two_fits_that_differ_never_share_a_teacher(one, other):
    assert fitted(one) != fitted(other)
    assert fitted(one) == fitted(one)
