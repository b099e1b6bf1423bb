"""Rank and world size, as real launchers set them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kd.core.errors import BackendError
from kd.parts.backends import cuda
from kd.parts.backends._launch import read_launch

JOIN = """
import torch.distributed as dist
from kd.core.errors import BackendError
from kd.parts.backends.cpu import CPU
try:
    backend = CPU("fp32", 120.0, 1)
    backend.setup()  # all-reduces a 1 over gloo
    world = dist.get_world_size() if dist.is_initialized() else 1
    print(f"<rank {backend.rank} local {backend.local_rank} of {world}>")
    backend.close()  # a process that ends with gloo's threads alive may be aborted
except BackendError as error:
    print(error)
"""
ACCELERATE = (
    "accelerate",
    "launch",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
)
ONE = "accelerate was to start several processes, and has started one"
LAUNCHERS = {
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node", "2"),
    "accelerate, as on GPUs": (*ACCELERATE, "--multi_gpu", "--num_processes", "2"),
    "mpirun": (
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "2",
        sys.executable,
    ),
}


def launched(command: tuple[str, ...], folder: Path) -> str:
    """Return what the processes print that a launcher starts."""
    path = os.pathsep.join(
        (str(Path(sys.executable).parent), os.environ.get("PATH", ""))
    )
    if shutil.which(command[0], path=path) is None:
        pytest.skip(f"{command[0]} is not installed")
    (folder / "join.py").write_text(JOIN)
    meeting = (
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
        if command[0] == "mpirun"
        else {}
    )
    paths = os.pathsep.join(
        filter(None, (str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH")))
    )
    env = {
        **os.environ,
        "PYTHONPATH": paths,
        "PATH": path,
        "GLOO_SOCKET_IFNAME": "lo",
        **meeting,
    }
    argv = [*command, str(folder / "join.py")]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=240, check=True, env=env
    ).stdout


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_of_two_processes_makes_a_world_of_two(launcher, tmp_path):
    text = launched(LAUNCHERS[launcher], tmp_path)
    assert (
        text.count("<rank 0 local 0 of 2>") == text.count("<rank 1 local 1 of 2>") == 1
    )


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.slow
def test_accelerate_on_cpus_starts_one_process_and_kd_says_so(tmp_path, processes):
    """It was trained on one rank, and `zero` did nothing, without a word."""
    text = launched((*ACCELERATE, "--cpu", "--num_processes", processes), tmp_path)
    assert ("<rank 0 local 0 of 1>" in text) == (processes == "1")
    assert (ONE in text) == (processes == "2")


def test_a_single_process_of_a_multiprocess_accelerate_launch_is_refused(monkeypatch):
    """With the variables that it sets then."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert read_launch().world_size == 1
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(BackendError, match=f"{ONE}.*torchrun"):
        read_launch()


@pytest.mark.parametrize("on", [False, True])
def test_cudnn_times_convolutions_only_if_configured(monkeypatch, on):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    cudnn = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    cudnn.benchmark = not on
    try:
        cuda.build(cuda.Options(cudnn_benchmark=on), "fp32", 60.0)
        assert cudnn.benchmark == on
    finally:
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before
