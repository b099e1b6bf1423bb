"""torch.compile after a kill or a full disk: a library that cannot be loaded is
compiled anew.
"""

import os
import shutil
import subprocess
import sys

import pytest

from kd.models.compiled import _unfinished

SCRIPT = """
import sys, torch
from torch import nn
from kd.models.compiled import compile_forward
from kd.setup.modes import ExecutionMode, require_mode
torch.manual_seed(0)
net = compile_forward(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)))
require_mode(lambda: net(torch.ones(5, 8)), "student.compile", ExecutionMode("fp32", "fused", compiled=True))
net(torch.ones(5, 8)).logsumexp(1).mean().backward()
print(net[0].weight.grad.norm().item())
"""


def compiled(folder) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_library_that_cannot_be_loaded_is_compiled_anew(tmp_path):
    """Empty, as a killed linker leaves it, it is found before it is loaded; cut short,
    when it is.
    """
    first = compiled(tmp_path)
    assert first.returncode == 0, first.stderr
    for size, message in ((0, "never finished"), (100, "compiled again")):
        # of the forward and of the backward
        libraries = sorted(tmp_path.rglob("*.main.so"))
        assert len(libraries) > 1
        assert not any(map(_unfinished, libraries))
        times = libraries[0].stat().st_mtime_ns
        for library in libraries[1:] if size == 0 else libraries:
            os.truncate(library, size)
        again = compiled(tmp_path)
        assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
        assert message in again.stderr
        assert libraries[0].stat().st_mtime_ns != times
    times = libraries[0].stat().st_mtime_ns
    assert compiled(tmp_path).stdout == first.stdout
    assert libraries[0].stat().st_mtime_ns == times  # what is whole is used


def test_a_library_without_its_first_bytes_is_unfinished(tmp_path):
    for content, expected in (
        (b"", True),
        (bytes(100), True),
        (bytes(64) + b"code", True),
        (b"\x7fELF", False),
    ):
        (tmp_path / "one.so").write_bytes(content)
        assert _unfinished(tmp_path / "one.so") == expected
