"""A job with a data group on one machine, for trying it out: `kd-launch CONFIG --local dnn=1,data=2`."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from kd.cluster.hosts import end_marked, free_ports, marks
from kd.core.errors import BackendError
from kd.core.host import cores

RUN_MARK = "KD_RUN"  # the environment variable of all processes of a local job
LEAVE_SECONDS = 30.0  # how long a host may take to end after the training has ended


class LocalJob:
    """Hosts 127.0.0.2, 127.0.0.3, ... of a job: one process each, with the variables that SageMaker sets."""

    def __init__(self, groups: Mapping[str, int], argv: Sequence[str]) -> None:
        """Start all hosts with `kd.cluster.group ARGV`. `groups` has the number of hosts in each group."""
        if sys.platform != "linux":
            raise BackendError("--local", "needs Linux, where all of 127.0.0.0/8 is this machine", "", "Use Docker")
        names = iter(f"127.0.0.{number}" for number in range(2, 255))
        self.groups = {group: [next(names) for _ in range(count)] for group, count in groups.items()}
        self.mark, self.argv = secrets.token_hex(8), list(argv)
        hosts = [host for group in self.groups.values() for host in group]
        listed = {name: {"instance_group_name": name, "hosts": group} for name, group in self.groups.items()}
        self._environ = {
            **os.environ,
            **marks(self.mark, RUN_MARK),
            "SM_HOSTS": json.dumps(hosts),
            "SM_INSTANCE_GROUPS_DICT": json.dumps(listed),
            "KD_PORTS": ",".join(str(port) for port in free_ports(2)),
            "KD_DECODERS": os.environ.get("KD_DECODERS", str(max(1, cores() // len(hosts)))),
            "RAY_AUTH_MODE": "token",  # of Ray, which listens on all interfaces
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self.processes: dict[str, subprocess.Popen[Any]] = {}
        for host in hosts:
            self.start(host)

    def start(self, host: str) -> None:
        command = [sys.executable, "-m", "kd.cluster.group", *self.argv]
        self.processes[host] = subprocess.Popen(command, env={**self._environ, "SM_CURRENT_HOST": host})

    def wait(self) -> int:
        """Wait until all hosts have ended, and return the exit code of the training."""
        codes = [self.processes[host].wait() for host in self._trainers()]
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_SECONDS)
        return next((code for code in codes if code), 0)

    def stop(self) -> None:
        for host in self._trainers():
            self.processes[host].send_signal(signal.SIGTERM)

    def close(self) -> None:
        end_marked(self.mark, RUN_MARK)
        for process in self.processes.values():
            process.wait()

    def _trainers(self) -> list[str]:
        return [host for name, group in self.groups.items() if not name.startswith("data") for host in group]


def run_job(groups: Mapping[str, int], argv: Sequence[str]) -> int:
    """Run a job on this machine and return its exit code; all its processes have ended then."""
    job = LocalJob(groups, argv)

    def forward(number: int, frame: FrameType | None) -> None:
        job.stop()

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return job.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        job.close()
