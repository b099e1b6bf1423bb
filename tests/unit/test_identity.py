"""What is kept under which name: a fitted teacher, its cache, a store of pixels, a run folder."""

from __future__ import annotations

import pytest
import torch

from kd import config
from kd.jobs.teach import fit_key
from kd.models.classifier import Ensemble
from kd.models.load import Spec, load
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


def loaded(classes=("apple", "fig"), **args):
    """Return a teacher whose weights are the same whatever the arguments."""
    sizes = {"patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    model = load(Spec("teacher", "vit_tiny_patch16_224", sizes | args, classes), 16, with_features=False)
    torch.manual_seed(0)
    for tensor in model.network.state_dict().values():
        tensor.copy_(torch.randn_like(tensor))
    return model


@pytest.mark.parametrize("args", [{"num_heads": 8}, {"act_layer": "relu"}])
def test_weights_in_another_architecture_get_another_cache(args):
    one, other = loaded(), loaded(**args)
    assert one.identity()["teacher"] == other.identity()["teacher"]
    assert one.identity() != other.identity()
    assert loaded().identity() == one.identity()
    both = Ensemble([one, one], [1, 1]), Ensemble([one, other], [1, 1])
    assert both[0].identity() != both[1].identity()
