"""One host of a job: `python -m kd.cluster.group [-m MODULE] CONFIG [key=value ...]`,
the same on all hosts.

The first trainer runs the head of a Ray cluster, which all hosts join. A data host
leaves when the head has gone.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from kd.cluster.hosts import (
    Hosts,
    accelerated,
    end_marked,
    free_ports,
    hyperparameters,
    marked,
    marks,
    processes,
    read_hosts,
)
from kd.core.errors import BackendError, KdError
from kd.core.host import cores

RAY_MARK = "KD_RAY"  # like `kd.cluster.hosts.MARK`, for Ray's processes only
QUIET = {
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}  # else it logs pages about each lost host
# seconds that a host tries to join the first trainer: a job's hosts start minutes apart
MEET_SECONDS = 900.0
# seconds that the first trainer waits for missing hosts; then it begins without them
JOIN_SECONDS = 300.0
# seconds after which a head that neither accepts nor refuses a connection is lost
SILENCE_SECONDS = 60.0


def say(host: str, text: str) -> None:
    """Print a line of a host."""
    print(f"[{host}] {text}", file=sys.stderr)


class Node:
    """This host's part of the Ray cluster. Ray gets no accelerator: torchrun
    uses them.
    """

    def __init__(self, hosts: Hosts, mark: str) -> None:
        self.hosts, self.mark, self.head = hosts, mark, hosts.me == hosts.first
        self.folder = (
            tempfile.mkdtemp(prefix="kd-ray-", dir="/tmp") if self.head else ""
        )  # sockets need short paths
        self.joined = threading.Event()

    @property
    def address(self) -> str:
        """Address of the head; its name may not resolve before this host has joined."""
        return f"{socket.gethostbyname(self.hosts.first)}:{self.hosts.ports[0]}"

    def command(self) -> list[str]:
        own = socket.gethostbyname(self.hosts.me)
        common = [
            "--node-ip-address",
            own,
            "--num-cpus",
            str(num_decoders(self.hosts)),
            "--num-gpus",
            "0",
        ]
        common += [
            "--min-worker-port",
            "0",
            "--max-worker-port",
            "0",
            "--include-log-monitor",
            "false",
        ]
        if own.startswith("127."):
            common += ["--object-store-memory", str(256 * 2**20)]
        if self.head:
            port = self.address.rpartition(":")[2]
            role = [
                "--head",
                "--port",
                port,
                "--include-dashboard",
                "false",
                "--temp-dir",
                self.folder,
            ]
            if (
                find_spec("grpc") is not None
            ):  # else Ray also serves clients, on a port that may be in use
                role += ["--ray-client-server-port", str(free_ports(1)[0])]
        else:
            role = ["--address", self.address]
        return [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            *role,
            *common,
            "--disable-usage-stats",
        ]

    def start(self) -> bool:
        """Start Ray's processes and return whether they have joined the cluster."""
        environ = {**os.environ, **marks(self.mark), **marks(self.mark, RAY_MARK)}
        environ |= {"RAY_gcs_rpc_server_reconnect_timeout_s": "10"}
        told = subprocess.run(
            self.command(),
            env=environ,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if told.returncode == 0:
            self.joined.set()
        else:
            say(
                self.hosts.me,
                "Ray does not start here:"
                f" {told.stdout.decode(errors='replace').strip()[-2000:]}",
            )
        return told.returncode == 0

    def meet(self) -> None:
        """Wait until the head listens; BackendError after `MEET_SECONDS`."""
        deadline = time.monotonic() + MEET_SECONDS
        while True:
            try:
                return reach(self.address)
            except (
                OSError
            ) as error:  # its name cannot be resolved yet, or it does not listen yet
                if time.monotonic() > deadline:
                    wrong = (
                        f"host '{self.hosts.me}' cannot reach the first trainer"
                        f" ({error})"
                    )
                    remedy = (
                        "A private VPC must allow all TCP between the hosts of a job"
                    )
                    raise BackendError(
                        f"{self.hosts.first}:{self.hosts.ports[0]}", wrong, "", remedy
                    ) from error
            time.sleep(0.5)

    def keep_joined(self) -> None:
        """Join the cluster, and rejoin whenever Ray has ended here, until the head is
        gone.
        """
        answered = time.monotonic()
        while time.monotonic() < answered + SILENCE_SECONDS:
            if not self._alive():
                if self.joined.is_set():
                    say(self.hosts.me, "Ray has ended here; it is started again")
                end_marked(self.mark, RAY_MARK)
                self.start()
            time.sleep(1)
            with suppress(OSError):
                try:
                    reach(self.address)
                    answered = time.monotonic()
                except ConnectionRefusedError:
                    return

    def _alive(self) -> bool:
        for pid in marked(self.mark, RAY_MARK):
            with suppress(OSError):
                if (
                    Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip()
                    == "raylet"
                ):
                    return True
        return False

    def wait_for_all(self) -> None:
        from kd.cluster.ray_cluster import joined_hosts

        wanted = len(self.hosts.trainers) + len(self.hosts.data)
        if (joined := joined_hosts(wanted, JOIN_SECONDS)) < wanted:
            say(
                self.hosts.me,
                f"{joined} of {wanted} hosts have joined in {JOIN_SECONDS:g} s;"
                " training begins",
            )


def reach(address: str) -> None:
    """Connect to the head once; OSError: it does not listen, ConnectionRefusedError:
    its host does.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=5).close()


def num_decoders(hosts: Hosts, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of decoders on this host: one per core, without the cores of
    its trainers.
    """
    if "KD_DECODERS" in environ:
        return int(environ["KD_DECODERS"])
    if hosts.me in hosts.data:
        return cores()
    trainers = processes(environ)
    return (
        max(0, cores() - trainers)
        if trainers > 1 or accelerated()
        else min(1, cores() - 1)
    )


def run(hosts: Hosts, argv: Sequence[str]) -> int:
    """Do this host's part of a job with a data group, and return its exit code."""
    node = Node(hosts, secrets.token_hex(8))
    try:
        return train(node, argv) if hosts.me in hosts.trainers else decode(node)
    finally:
        end_marked(node.mark)
        if node.folder:
            shutil.rmtree(node.folder, ignore_errors=True)


def decode(node: Node) -> int:
    """Run decoders until the training has ended."""
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # the trainers got it too, and need images to finish a step
        signal.signal(number, lambda *_: None)
    node.meet()
    node.keep_joined()
    say(node.hosts.me, "training has ended")
    return 0


def train(node: Node, argv: Sequence[str]) -> int:
    """Run this host's trainers and return their exit code."""
    stopped, process = threading.Event(), None

    def stop(*_: object) -> None:
        stopped.set()
        if process is not None:
            process.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    if node.head:
        node.start()
    else:
        node.meet()
        threading.Thread(target=node.keep_joined, daemon=True).start()
    if not node.joined.wait(0 if node.head else JOIN_SECONDS) or stopped.is_set():
        return 1
    os.environ |= {"RAY_ADDRESS": node.address, **QUIET}
    if node.head:
        node.wait_for_all()
    process = subprocess.Popen(
        command(node.hosts, argv),
        env={
            **os.environ,
            **marks(node.mark),
            "SM_HOSTS": json.dumps(node.hosts.trainers),
        },
    )
    if stopped.is_set():  # the signal may arrive between the two lines above
        process.terminate()
    code = process.wait()
    return code if code >= 0 else 128 - code


def command(hosts: Hosts, argv: Sequence[str]) -> list[str]:
    """Return the command of this host's trainers: `kd-train ARGV`, or the module at the
    start of ARGV.
    """
    count = processes()
    script = list(argv) if argv[:1] == ["-m"] else ["-m", "kd.cli", "train", *argv]
    if len(hosts.trainers) * count == 1:
        return [sys.executable, *script]
    world = [
        "--nnodes",
        len(hosts.trainers),
        "--node-rank",
        hosts.trainers.index(hosts.me),
    ]
    world += [
        "--nproc-per-node",
        count,
        "--master-addr",
        hosts.first,
        "--master-port",
        hosts.ports[1],
    ]
    return [sys.executable, "-m", "torch.distributed.run", *map(str, world), *script]


def empty_config() -> Path:
    """Write a configuration without a key, in a new private folder: the temporary one
    is shared.
    """
    file = Path(tempfile.mkdtemp(prefix="kd-"), "kd-empty.yaml")
    file.write_text("{}\n", encoding="utf-8")
    return file


def main(argv: Sequence[str]) -> int:
    """Do this host's part of a job. SageMaker's only argument is `train`; the
    hyperparameters then replace it.
    """
    argv = list(argv)
    try:
        if argv == ["train"]:
            argv = [str(empty_config()), *hyperparameters()]
        hosts = read_hosts()
        if not hosts.data:
            os.environ["SM_HOSTS"] = json.dumps(hosts.trainers)
            os.execv(sys.executable, command(hosts, argv))
        return run(hosts, argv)
    except KdError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
