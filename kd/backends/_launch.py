"""Who started this process, and which of how many it is.

Read: torchrun (and `accelerate launch`, which sets the same variables), mpirun, SageMaker's own environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from kd.errors import BackendError

PORT = "29500"
"""Where the ranks of a SageMaker job meet; its hosts are its own, so the port is free."""


@dataclass(frozen=True, slots=True)
class Place:
    """This process among its peers."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


# Variables of each launcher: rank, world size, local rank, local world size. The first whose rank is set wins.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
}


def place(environ: Mapping[str, str] = os.environ) -> Place:
    """Read this process's place from the launcher's environment; alone where there is no launcher.

    Raises:
        BackendError: a launcher promises several processes but does not say which one this is.
    """
    present = [launcher for launcher, names in _LAUNCHERS.items() if names[0] in environ]
    promised = [launcher for launcher, names in _LAUNCHERS.items() if environ.get(names[1], "1") != "1"]
    if not present and not promised:
        return _sagemaker(environ)
    launcher = (present or promised)[0]
    names = _LAUNCHERS[launcher]
    try:
        rank, world_size = int(environ[names[0]]), int(environ[names[1]])
        local_rank, local_world_size = int(environ.get(names[2], rank)), int(environ.get(names[3], world_size))
    except (KeyError, ValueError) as error:
        remedy = "Start with `torchrun --standalone --nproc-per-node N -m kd.cli.train CONFIG`"
        raise BackendError(
            "backend", f"{launcher}'s environment is not whole ({error})", f"Expected: {', '.join(names)}", remedy
        ) from error
    if not 0 <= rank < world_size:
        remedy = f"Unset {names[0]} and {names[1]}, or start with torchrun"
        raise BackendError("backend", f"{launcher} says rank {rank} of {world_size}", "0 <= rank < world size", remedy)
    return Place(launcher, rank, world_size, local_rank, local_world_size)


def _sagemaker(environ: Mapping[str, str]) -> Place:
    """One process a host, where SageMaker runs the script itself on several hosts; else alone."""
    hosts = _hosts(environ)
    if len(hosts) < 2:
        return Place("none", 0, 1, 0, 1)
    current = environ.get("SM_CURRENT_HOST", "")
    if current not in hosts:
        raise BackendError(
            "backend",
            f"SageMaker promises {len(hosts)} hosts, but SM_CURRENT_HOST '{current}' is none of them",
            f"One of: {', '.join(hosts)}",
            "Start with torchrun",
        )
    return Place("sagemaker", hosts.index(current), len(hosts), 0, 1)


def _hosts(environ: Mapping[str, str]) -> list[str]:
    try:
        return sorted(str(host) for host in json.loads(environ.get("SM_HOSTS", "[]")))
    except (ValueError, TypeError):
        return []


def announce(where: Place, environ: MutableMapping[str, str] = os.environ) -> None:
    """Write into the environment what torch's rendezvous reads, where this launcher does not.

    Raises:
        BackendError: nothing says at which address the ranks meet.
    """
    environ.setdefault("RANK", str(where.rank))
    environ.setdefault("WORLD_SIZE", str(where.world_size))
    hosts = _hosts(environ)
    if hosts:
        environ.setdefault("MASTER_ADDR", hosts[0])
        environ.setdefault("MASTER_PORT", PORT)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise BackendError(
            "backend",
            f"{where.launcher} promises {where.world_size} processes, but {' and '.join(missing)} is not set",
            "All ranks need the address of rank 0",
            f"Export {' and '.join(missing)}, or start with torchrun",
        )
