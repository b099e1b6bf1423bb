"""Rank and world size, from the environment variables of the launcher.

Supported: torchrun (and `accelerate launch`, which sets the same variables), mpirun, and SageMaker.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from kd.errors import BackendError

PORT = "29500"
"""MASTER_PORT of a SageMaker job. Its hosts run nothing else, so the port is free."""


@dataclass(frozen=True, slots=True)
class Place:
    """Rank and world size of this process, global and on this machine."""

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
    """Read rank and world size from the launcher's environment; (0, 1) without a launcher.

    Raises:
        BackendError: a launcher sets a world size but no rank, or values out of range.
    """
    present = [launcher for launcher, names in _LAUNCHERS.items() if names[0] in environ]
    several = [launcher for launcher, names in _LAUNCHERS.items() if environ.get(names[1], "1") != "1"]
    if not present and not several:
        return _sagemaker(environ)
    launcher = (present or several)[0]
    names = _LAUNCHERS[launcher]
    try:
        rank, world_size = int(environ[names[0]]), int(environ[names[1]])
        local_rank, local_world_size = int(environ.get(names[2], rank)), int(environ.get(names[3], world_size))
    except (KeyError, ValueError) as error:
        remedy = "Start with `torchrun --standalone --nproc-per-node N -m kd.cli train CONFIG`"
        raise BackendError(
            "backend", f"{launcher}'s environment is incomplete ({error})", f"Expected: {', '.join(names)}", remedy
        ) from error
    if not 0 <= rank < world_size:
        remedy = f"Unset {names[0]} and {names[1]}, or start with torchrun"
        raise BackendError("backend", f"{launcher} set rank {rank} of {world_size}", "0 <= rank < world size", remedy)
    return Place(launcher, rank, world_size, local_rank, local_world_size)


def _sagemaker(environ: Mapping[str, str]) -> Place:
    """Return one process per host where SageMaker runs the script on several hosts; else a single process."""
    hosts = _hosts(environ)
    if len(hosts) < 2:
        return Place("none", 0, 1, 0, 1)
    current = environ.get("SM_CURRENT_HOST", "")
    if current not in hosts:
        raise BackendError(
            "backend",
            f"SageMaker lists {len(hosts)} hosts, but SM_CURRENT_HOST '{current}' is none of them",
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
    """Set the environment variables of torch's rendezvous where the launcher has not set them.

    Raises:
        BackendError: MASTER_ADDR or MASTER_PORT is not known.
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
            f"{where.launcher} set a world size of {where.world_size}, but {' and '.join(missing)} is not set",
            "All ranks need the address of rank 0",
            f"Export {' and '.join(missing)}, or start with torchrun",
        )
