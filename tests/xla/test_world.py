"""What several replicas would compute, what torch_xla does not do on a CPU, and errors
that must not be swallowed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kd.core.errors import DataError

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PJRT_DEVICE": "CPU",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
    }


@pytest.mark.parametrize(
    ("kind", "operation"),
    [("clip", "all-reduce"), ("plain", "all-reduce"), ("zero", "reduce-scatter")],
)
def test_two_replicas_reduce_once_and_divide_by_two(kind, operation):
    process = subprocess.run(
        [sys.executable, str(HERE / "two_replicas.py"), kind],
        env=environment(),
        capture_output=True,
        text=True,
    )
    graph = process.stdout
    assert process.returncode == 0, process.stderr
    shapes = [
        line for line in graph.splitlines() if re.search(rf" {operation}\(", line)
    ]
    gradients = [line for line in shapes if re.search(r"f32\[(3,4|2,4|2|3)\]", line)]
    # torch_xla reduces the list of gradients in one operation, and scatters each of the
    # two by itself
    assert len(gradients) == (2 if kind == "zero" else 1), graph
    assert "constant(0.5)" in graph


def test_two_processes_on_the_cpu_are_refused(run_file, tmp_path):
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    argv += [
        "-m",
        "kd.cli",
        "train",
        str(run_file),
        "backend.kind=xla",
        f"run.folder={tmp_path}",
    ]
    process = subprocess.run(
        argv, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert process.returncode != 0
    assert "1 of the 2 processes" in process.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_image_stops_the_run(photos, train, tmp_path):
    # the device loader's thread drops what it raises: without care the epoch would
    # merely end, over and over
    import shutil

    shutil.copytree(photos, tmp_path / "photos")
    victim = next((tmp_path / "photos" / "train").rglob("*.jpg"))
    victim.write_bytes(victim.read_bytes()[:200])
    with pytest.raises(DataError, match=victim.name):
        train("xla", f"data.root={tmp_path / 'photos'}")


def test_the_compilers_flags_are_extended_and_never_overwritten(monkeypatch):
    from kd.parts import registry

    module = registry.find("backends", "xla", "test")
    monkeypatch.setenv("NEURON_CC_FLAGS", "--model-type=transformer")
    backend = module.build(module.Options(), precision="fp32", timeout_seconds=5.0)
    backend.setup()
    assert os.environ["NEURON_CC_FLAGS"] == "--model-type=transformer --auto-cast=none"
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast=matmult")
    backend.setup()
    assert os.environ["NEURON_CC_FLAGS"] == "--auto-cast=matmult"


def test_seeds_reach_the_device():
    from kd.parts import registry

    module = registry.find("backends", "xla", "test")
    backend = module.build(module.Options(), precision="fp32", timeout_seconds=5.0)
    backend.setup()
    draws = []
    for seed in (2**62 + 1, 2**62 + 1, 7):
        backend.seed(seed)
        draws.append(
            torch.nn.functional.dropout(torch.ones(64, device=backend.device)).cpu()
        )
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("teacher.shard=true", "teacher.shard: is true, but torch_xla"),
        ("teacher.pipeline=2", "teacher.pipeline: is 2, but torch_xla"),
    ],
)
def test_unsupported_options_are_refused(train, tmp_path, override, text):
    from kd.core.errors import KdError

    with pytest.raises(KdError, match=text.replace(".", r"\.")):
        train("xla", override, "data.micro_batch=0", folder=tmp_path / "run")


def test_flags_of_the_cpu_compiler_are_extended_and_never_overwritten():
    from kd.parts.backends.xla import _skip_llvm_passes

    level = "--xla_backend_optimization_level"
    for environment, expected in (
        ({"PJRT_DEVICE": "CPU"}, f"{level}=0"),
        (
            {"PJRT_DEVICE": "CPU", "XLA_FLAGS": "--xla_dump_to=x"},
            f"--xla_dump_to=x {level}=0",
        ),
        ({"PJRT_DEVICE": "CPU", "XLA_FLAGS": f"{level}=2"}, f"{level}=2"),
        ({"PJRT_DEVICE": "NEURON", "XLA_FLAGS": "--a"}, "--a"),
    ):
        _skip_llvm_passes(environment)
        assert environment["XLA_FLAGS"] == expected
