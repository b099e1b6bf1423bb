"""Rank and world size, as launchers set them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

READ = """
from kd.core.errors import BackendError
from kd.parts.backends._launch import read_launch
try:
    launch = read_launch()
    print("world", launch.world_size)
except BackendError as error:
    print(error)
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_accelerate_on_cpus_starts_one_process_and_kd_says_so(tmp_path: Path, processes: int):
    """It was trained on one rank, and `zero` did nothing, without a word."""
    start = shutil.which("accelerate", path=str(Path(sys.executable).parent))
    if start is None:
        pytest.skip("the extra track is not installed")
    (tmp_path / "read.py").write_text(READ)
    command = [start, "launch", "--cpu", "--num_processes", str(processes), str(tmp_path / "read.py")]
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH"))))
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=True, env={**os.environ, "PYTHONPATH": paths}
    )
    if processes == 1:
        assert answer.stdout.split() == ["world", "1"]
    else:
        assert "accelerate was asked for several processes, and has started one" in answer.stdout
        assert "torchrun" in answer.stdout
