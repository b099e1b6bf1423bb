"""Read rank and world size from the environment variables of the launcher.

Supported: torchrun, Open MPI's mpirun, SageMaker, and `accelerate launch`, which runs
torchrun for GPUs (`--multi_gpu`) and mpirun for CPUs (`--cpu --mpirun_hostfile`).
"""

import json
import os
from dataclasses import dataclass

from kd.core.errors import BackendError

# MASTER_PORT of a SageMaker job. Its hosts run nothing else, so the port is free.
PORT = "29500"


@dataclass(frozen=True, slots=True)
class Launch:
    """The rank and world size of this process, global and on this machine."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


# Variables of each launcher: rank, world size, local rank, local world size. The first
# whose rank is set wins.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": tuple(
        f"OMPI_COMM_WORLD_{name}"
        for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ),
}


def read_launch() -> Launch:
    """Read rank and world size from the launcher's environment, else rank 0 of 1."""
    with_rank = [
        launcher for launcher, names in _LAUNCHERS.items() if names[0] in os.environ
    ]
    with_world = [
        launcher
        for launcher, names in _LAUNCHERS.items()
        if os.environ.get(names[1], "1") != "1"
    ]
    if not with_rank and not with_world:
        return _read_sagemaker_hosts()
    launcher = (with_rank or with_world)[0]
    names = _LAUNCHERS[launcher]
    try:
        rank = int(os.environ[names[0]])
        world_size = int(os.environ[names[1]])
        local_rank = int(os.environ.get(names[2], rank))
        local_world_size = int(os.environ.get(names[3], world_size))
    except (KeyError, ValueError) as error:
        remedy = (
            "Start with `torchrun --standalone --nproc-per-node N -m kd.cli train"
            " CONFIG`"
        )
        wrong = f"{launcher}'s environment is incomplete ({error})"
        raise BackendError(
            "backend", wrong, f"Expected: {', '.join(names)}", remedy
        ) from error
    if not 0 <= rank < world_size:
        wrong = f"{launcher} set rank {rank} of {world_size}"
        remedy = f"Unset {names[0]} and {names[1]}, or start with torchrun"
        raise BackendError("backend", wrong, "0 <= rank < world size", remedy)
    return Launch(launcher, rank, world_size, local_rank, local_world_size)


def _read_sagemaker_hosts() -> Launch:
    """Return one process per host of a SageMaker job; else a single process."""
    # A process of `accelerate launch --cpu --num_processes N` without mpirun is
    # refused: accelerate starts only one. With N above 1 it sets the rendezvous
    # address, but no rank and no world size.
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ:
        wrong = (
            "accelerate was to start several processes, and has started one without a"
            " rank"
        )
        allowed = "On CPUs it starts several with --mpirun_hostfile and Open MPI"
        remedy = (
            "Start with `torchrun --standalone --nproc-per-node N -m kd.cli train"
            " CONFIG`, or --num_processes 1"
        )
        raise BackendError("backend", wrong, allowed, remedy)
    hosts = _hosts()
    if len(hosts) < 2:
        return Launch("none", 0, 1, 0, 1)
    current = os.environ.get("SM_CURRENT_HOST", "")
    if current not in hosts:
        wrong = (
            f"SageMaker lists {len(hosts)} hosts, but SM_CURRENT_HOST '{current}' is"
            " not one of them"
        )
        raise BackendError(
            "backend", wrong, f"One of: {', '.join(hosts)}", "Start with torchrun"
        )
    return Launch("sagemaker", hosts.index(current), len(hosts), 0, 1)


def _hosts() -> list[str]:
    try:
        return sorted(
            str(host) for host in json.loads(os.environ.get("SM_HOSTS", "[]"))
        )
    except (ValueError, TypeError):
        return []


def set_rendezvous(launch: Launch) -> None:
    os.environ.setdefault("RANK", str(launch.rank))
    os.environ.setdefault("WORLD_SIZE", str(launch.world_size))
    hosts = _hosts()
    if hosts:
        os.environ.setdefault("MASTER_ADDR", hosts[0])
        os.environ.setdefault("MASTER_PORT", PORT)
    missing = " and ".join(
        name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    )
    if missing:
        wrong = (
            f"{launch.launcher} set a world size of {launch.world_size}, but {missing}"
            " is not set"
        )
        allowed = "All ranks need the address of rank 0"
        raise BackendError(
            "backend", wrong, allowed, f"Export {missing}, or start with torchrun"
        )
