"""Read the hosts of a SageMaker job on one of them, or run a job on one machine."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd.core.errors import BackendError
from kd.core.host import cores
from kd.files.json_file import read_json

INPUT = Path("/opt/ml/input/config")
RAY = 6379  # port of the first trainer for Ray
TORCH = 29500  # port of the first trainer for torch's rendezvous
# environment variable of all processes of a host, inherited by children
MARK = "KD_HOST"
RUN_MARK = "KD_RUN"  # environment variable of all processes of a local job
# begin of a hyperparameter that has a piece of the configuration, as JSON
PIECE = "config_piece_"
LEAVE_SECONDS = 30.0  # seconds in which a host must end after the training


@dataclass(frozen=True, slots=True)
class Hosts:
    """Group the hosts of a job by their role."""

    me: str
    trainers: tuple[str, ...]
    data: tuple[str, ...]  # hosts that only decode images; may be none
    ports: tuple[int, ...] = (RAY, TORCH)

    @property
    def first(self) -> str:
        """Return the trainer at which the others rendezvous."""
        return self.trainers[0]


def read_hosts(
    environ: Mapping[str, str] = os.environ, file: Path = INPUT / "resourceconfig.json"
) -> Hosts:
    """Return the hosts of this job from SageMaker's variables or file."""
    # groups whose names begin with `data` decode
    try:
        config = _resource_config(environ, file)
        me = str(config.get("current_host") or "localhost")
        groups = {
            group["instance_group_name"]: list(group["hosts"])
            for group in config.get("instance_groups") or ()
        }
        groups = groups or {"all": list(config.get("hosts") or [me])}
        ports = (RAY, TORCH)
        if "KD_PORTS" in environ:
            ports = tuple(map(int, environ["KD_PORTS"].split(",")))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        wrong = (
            "the job's description of its hosts cannot be read"
            f" ({type(error).__name__}: {error})"
        )
        raise BackendError(
            "SM_INSTANCE_GROUPS_DICT", wrong, "As in resourceconfig.json", ""
        ) from error
    decoding = [name for name in groups if name.startswith("data")]
    data = tuple(sorted(host for name in decoding for host in groups[name]))
    trainers = tuple(
        sorted(host for name in groups if name not in decoding for host in groups[name])
    )
    if not trainers or me not in trainers + data:
        problem = "is in none" if trainers else "has no trainers"
        wrong = f"host '{me}' of the groups {', '.join(groups)} {problem}"
        allowed = (
            "Groups whose name begins with `data` decode, at least one other group"
            " trains"
        )
        raise BackendError(
            "SM_INSTANCE_GROUPS_DICT", wrong, allowed, "Rename the groups"
        )
    return Hosts(me, trainers, data, ports)


def _resource_config(environ: Mapping[str, str], file: Path) -> dict[str, Any]:
    if "SM_CURRENT_HOST" not in environ:
        if not file.is_file():
            return {}
        return read_json(
            file, "backend", "Start it as a SageMaker job", kind=BackendError
        )
    groups = list(json.loads(environ.get("SM_INSTANCE_GROUPS_DICT") or "{}").values())
    return {
        "current_host": environ["SM_CURRENT_HOST"],
        "hosts": json.loads(environ.get("SM_HOSTS") or "[]"),
        "instance_groups": groups,
    }


def hyperparameters(file: Path = INPUT / "hyperparameters.json") -> list[str]:
    """Return the configuration in a job's hyperparameters as `key=value`."""
    return read_json(
        file,
        "train",
        "Give CONFIG key=value instead",
        overrides,
        BackendError,
        required=True,
    )


def overrides(content: Mapping[str, str]) -> list[str]:
    """Return hyperparameters, without SageMaker's own, as sorted `key=value`."""
    pieces = [content[key] for key in sorted(content) if key.startswith(PIECE)]
    keys = {**content, **json.loads("".join(pieces) or "{}")}
    return [
        f"{key}={value}"
        for key, value in sorted(keys.items())
        if not key.startswith((PIECE, "sagemaker_"))
    ]


def num_trainers(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of trainers on this host: one per accelerator, else one."""
    for name in ("KD_PROCESSES", "SM_NUM_NEURONS", "SM_NUM_GPUS"):
        if environ.get(name, "").isdigit() and int(environ[name]):
            return int(environ[name])
    if Path("/dev/neuron0").exists():
        remedy = "Set the variable KD_PROCESSES to the number of NeuronCores"
        raise BackendError(
            "SM_NUM_NEURONS", "is not set, but this host has Neuron devices", "", remedy
        )
    return max(1, len(list(Path("/dev").glob("nvidia[0-9]*"))))


def has_accelerator() -> bool:
    """Return whether this host has an NVIDIA or Neuron device."""
    patterns = ("nvidia[0-9]*", "neuron[0-9]*")
    return any(any(Path("/dev").glob(pattern)) for pattern in patterns)


def free_ports(count: int) -> list[int]:
    """Return free ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def marks(mark: str, name: str = MARK) -> dict[str, str]:
    """Return the environment variables by which `marked_processes` finds a process."""
    # two, because Ray's agents overwrite one
    return {name: mark, f"{name}_AGAIN": mark}


def marked_processes(mark: str, name: str = MARK) -> Iterator[int]:
    """Yield the other running processes with one of these `marks`."""
    entries = {f"{key}={value}".encode() for key, value in marks(mark, name).items()}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            environ = (folder / "environ").read_bytes().split(b"\0")
            if entries.intersection(environ) and int(folder.name) != os.getpid():
                yield int(folder.name)


def end_marked(mark: str, name: str = MARK, grace: float = 3.0) -> int:
    """End the marked processes, by force after `grace` seconds; return their number."""
    pids = set(marked_processes(mark, name))
    deadline = time.monotonic() + grace
    signal_all(pids, signal.SIGTERM)
    while running := list(marked_processes(mark, name)):
        if time.monotonic() >= deadline + grace:
            break
        if time.monotonic() > deadline:
            signal_all(running, signal.SIGKILL)
        time.sleep(0.1)
    return len(pids)


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to those processes that still run."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class LocalJob:
    """Run the hosts of a job on this machine, as 127.0.0.2, 127.0.0.3, ...

    Each is one process with the variables that SageMaker sets.
    """

    def __init__(self, groups: Mapping[str, int], argv: Sequence[str]) -> None:
        """Start the hosts of all groups (numbers by name) with `ARGV`."""
        if sys.platform != "linux":
            raise BackendError(
                "--local",
                "needs Linux, where all of 127.0.0.0/8 is this machine",
                "",
                "Use Docker",
            )
        names = iter(f"127.0.0.{number}" for number in range(2, 255))
        self.groups = {
            group: [next(names) for _ in range(count)]
            for group, count in groups.items()
        }
        self.mark = secrets.token_hex(8)
        self.argv = list(argv)
        hosts = [host for group in self.groups.values() for host in group]
        instance_groups = {
            name: {"instance_group_name": name, "hosts": group}
            for name, group in self.groups.items()
        }
        decoders = str(max(1, cores() // len(hosts)))
        self._environ = {
            **os.environ,
            **marks(self.mark, RUN_MARK),
            "SM_HOSTS": json.dumps(hosts),
            "SM_INSTANCE_GROUPS_DICT": json.dumps(instance_groups),
            "KD_PORTS": ",".join(str(port) for port in free_ports(2)),
            "KD_DECODERS": os.environ.get("KD_DECODERS", decoders),
            "RAY_AUTH_MODE": "token",  # else Ray listens on all interfaces
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self.processes: dict[str, subprocess.Popen[Any]] = {}
        for host in hosts:
            self.start(host)

    def start(self, host: str) -> None:
        command = [sys.executable, "-m", "kd.cluster.group", *self.argv]
        self.processes[host] = subprocess.Popen(
            command, env={**self._environ, "SM_CURRENT_HOST": host}
        )

    def wait(self) -> int:
        """Wait until all hosts have ended, and return the exit code of the training."""
        codes = [self.processes[host].wait() for host in self._trainers()]
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_SECONDS)
        failures = [code for code in codes if code]
        return failures[0] if failures else 0

    def stop(self) -> None:
        for host in self._trainers():
            self.processes[host].send_signal(signal.SIGTERM)

    def close(self) -> None:
        end_marked(self.mark, RUN_MARK)
        for process in self.processes.values():
            process.wait()

    def _trainers(self) -> list[str]:
        return [
            host
            for name, group in self.groups.items()
            if not name.startswith("data")
            for host in group
        ]


def run_job(groups: Mapping[str, int], argv: Sequence[str]) -> int:
    """Run a job on this machine until all its processes end; return its exit code."""
    job = LocalJob(groups, argv)
    before = {
        number: signal.signal(number, lambda *_: job.stop())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        return job.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        job.close()
