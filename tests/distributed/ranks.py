"""Worlds of real processes for tests: `start(target, argv, ranks=2)`."""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
STEPS = 20
"""Of the runs of this folder."""


class World(NamedTuple):
    """How a world ended, rank by rank."""

    codes: list[int]
    """Exit codes; -9 for a rank that was killed."""
    seconds: list[float]
    """From the start to the end of each rank."""
    logs: list[str]
    """What each rank printed."""

    def ended_well(self) -> World:
        """Require that all ranks exited with 0."""
        assert not any(self.codes), "\n".join([str(self.codes), *self.logs])
        return self


def environment() -> dict[str, str]:
    """Return the environment for a child: no launcher's variables, one thread, the
    repository importable.
    """
    launchers = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "OMPI_",
        "SM_",
        "TORCHELASTIC_",
        "GROUP_",
        "ROLE_",
        "KD_",
    )
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(launchers)
    }
    return {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests' / 'helpers'}",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def variables(launcher: str, rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what a launcher would set for a rank on one machine."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if (
        launcher == "sagemaker"
    ):  # names that sort by rank; the first must be an address here
        hosts = ["127.0.0.1", *(f"algo-{n}" for n in range(2, world_size + 1))]
        return {
            "SM_HOSTS": json.dumps(hosts),
            "SM_CURRENT_HOST": hosts[rank],
            "MASTER_PORT": str(port),
        }
    names = {
        "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        "mpirun": tuple(
            f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")
        ),
    }[launcher]
    return {
        **dict(zip(names, map(str, (rank, rank, world_size, world_size)), strict=True)),
        **meeting,
    }


@functools.cache
def zygote() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(HERE / "zygote.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.wait()


def start(
    target: str,
    argv: Sequence[object],
    ranks: int = 1,
    env: Mapping[str, str] = {},
    path: Sequence[Path] = (HERE,),
    timeout: float = 90.0,
    launcher: str = "torchrun",
) -> World:
    """Run `target` ("module:function", called with argv) on every rank and wait for all
    of them.

    `ranks=1` starts it without a launcher; more get the variables of torchrun, mpirun
    or sagemaker. After `timeout` seconds the ranks that are left are killed, and the
    test fails.
    """
    port = free_port()
    process = zygote()
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.TemporaryDirectory() as logs:
        requests = [
            {
                "target": target,
                "argv": [str(item) for item in argv],
                "env": {
                    **(variables(launcher, rank, ranks, port) if ranks > 1 else {}),
                    **env,
                },
                "path": [str(folder) for folder in path],
                "log": f"{logs}/{rank}",
            }
            for rank in range(ranks)
        ]
        process.stdin.write(json.dumps({"ranks": requests, "timeout": timeout}) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        texts = [Path(f"{logs}/{rank}").read_text() for rank in range(ranks)]
    assert not answer["expired"], f"still running after {timeout} s:\n" + "\n".join(
        texts
    )
    return World(answer["codes"], answer["seconds"], texts)
