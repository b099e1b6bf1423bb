"""The oldest versions that pyproject.toml allows: they are what is tested, and what
they cannot do is refused.

`make test-floor` runs this and the tests of the core; with newer packages it is
skipped.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.version import Version

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    torch.__version__ >= "2.9", reason="the packages are newer; see `make test-floor`"
)


def test_every_package_is_the_oldest_allowed():
    section = re.search(
        r"^dependencies = \[(.*?)^\]",
        (ROOT / "pyproject.toml").read_text(),
        re.S | re.M,
    )
    oldest = dict(re.findall(r'^ *"([a-z]+)>=([\d.]+)"', section[1], re.M))
    assert {
        "torch",
        "timm",
        "omegaconf",
        "safetensors",
        "accelerate",
        "numpy",
        "pillow",
    } <= oldest.keys()
    for name, least in oldest.items():
        assert Version(version(name).partition("+")[0]) == Version(least), name


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("teacher.shard=true", ("teacher.shard:", "2.9 or newer")),
        ("teacher.pipeline=2", ("teacher.pipeline:", "2.13 or")),
    ],
)
def test_a_teacher_that_is_divided_needs_a_newer_torch(
    written, refused, inside, override, words
):
    line = refused("train", written(), override)
    assert all(
        word in line for word in (*words, f"this is torch {torch.__version__}")
    ), line


def test_the_onnx_export_needs_a_newer_torch(distilled, refused, inside):
    line = refused("export", distilled, "--to", inside / "export")
    assert "torch 2.9 or newer" in line
    assert list(inside.iterdir()) == []
