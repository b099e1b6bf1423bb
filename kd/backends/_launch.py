"""Who started this process, and which of how many it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kd.errors import BackendError


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
        BackendError: a launcher promises several processes but does not say how they meet.
    """
    for launcher, names in _LAUNCHERS.items():
        if names[0] not in environ:
            continue
        try:
            rank, world_size = int(environ[names[0]]), int(environ[names[1]])
            local_rank, local_world_size = int(environ.get(names[2], rank)), int(environ.get(names[3], world_size))
        except (KeyError, ValueError) as error:
            remedy = "Start with `torchrun --standalone --nproc-per-node N -m kd.cli.train CONFIG`"
            raise BackendError(
                "backend", f"{launcher}'s environment is not whole ({error})", f"Expected: {', '.join(names)}", remedy
            ) from error
        return Place(launcher, rank, world_size, local_rank, local_world_size)
    return Place("none", 0, 1, 0, 1)


def require_meeting_point(where: Place, environ: Mapping[str, str] = os.environ) -> None:
    """Require the address at which the ranks meet."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if where.world_size > 1 and missing:
        raise BackendError(
            "backend",
            f"{where.launcher} promises {where.world_size} processes, but {' and '.join(missing)} is not set",
            "All ranks need the address of rank 0",
            f"Export {' and '.join(missing)}, or start with torchrun",
        )
