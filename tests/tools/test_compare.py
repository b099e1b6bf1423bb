"""tools/compare.py tells timm what the configuration says. A run of it needs a checkout
of timm.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from kd import config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    spec = importlib.util.spec_from_file_location(
        "compare_tool", ROOT / "tools" / "compare.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings(**student):
    return config.load(
        {
            "run": {"epochs": 20},
            "data": {
                "kind": "imagefolder",
                "root": "photos",
                "image_size": 64,
                "batch_size": 16,
            },
            "teacher": {"model": "vit_tiny_patch16_224"},
            "student": {"model": "vit_tiny_patch16_224", **student},
            "losses": [{"kind": "kl", "temperature": 3.0}],
            "optimizer": {"lr": 1e-3, "warmup": 0.05},
        }
    )


def test_flags_of_timm_say_what_the_configuration_says(compare):
    flags = compare.timm_flags(settings(args={"depth": 2}), 5, seed=7)
    expected = {
        "num-classes": 5,
        "seed": 7,
        "img-size": 64,
        "batch-size": 16,
        "lr": 1e-3,
        "kd-temperature": 3.0,
    }
    assert flags.items() >= expected.items()
    assert (flags["epochs"], flags["warmup-epochs"]) == (20, 1)
    assert flags["model-kwargs"] == ["depth=2", "img_size=64"]  # as kd builds it


def test_options_without_a_timm_equivalent_are_refused(compare):
    assert "model-kwargs" not in compare.timm_flags(
        settings(model="resnet18"), 5, seed=0
    )
    loaded = config.load(config.to_dict(settings()), ["run.epochs=3"])
    with pytest.raises(SystemExit, match=r"optimizer\.warmup_ratio"):
        compare.timm_flags(loaded, 5, seed=0)


def test_curves_are_read_from_what_timm_prints(compare):
    lines = (
        (
            "Train: 0 [  92/93 (100%)]  Loss: 2.1 (2.2)  Time: 0.3s, 320/s  (0.250s, "
            " 300.1/s)  LR: 1e-3"
        ),
        (
            "Test: [   2/2]  Time: 0.1  Loss: 1.9  Acc@1:  50.0 ( 27.500)  Acc@5: 80.0"
            " (81.0)"
        ),
    )
    finished = compare.Finished([(0.0, line) for line in lines], 1.0, 1.0, 1.0)
    assert compare.curve_of_timm(finished) == [
        {"epoch": 1, "training_seconds": 23.25, "accuracy": 27.5}
    ]
