"""Do one host's part of a job, by the same command on all hosts.

Run: python -m kd.cluster.group [-m MODULE] CONFIG [key=value ...]

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
    end_marked,
    free_ports,
    has_accelerator,
    hyperparameters,
    marked_processes,
    marks,
    num_trainers,
    read_hosts,
)
from kd.core.errors import BackendError, KdError
from kd.core.host import cores

RAY_MARK = "KD_RAY"  # like `kd.cluster.hosts.MARK`, for Ray's processes only
# else it logs pages about each lost host
QUIET = {"RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}
# no GPUs, since torchrun uses them
RAY_OPTIONS = (
    "--num-gpus 0 --min-worker-port 0 --max-worker-port 0"
    " --include-log-monitor false --disable-usage-stats"
)
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
    """Run this host's part of the Ray cluster."""

    def __init__(self, hosts: Hosts, mark: str) -> None:
        self.hosts = hosts
        self.mark = mark
        self.head = hosts.me == hosts.first
        self.folder = ""
        if self.head:  # sockets need short paths
            self.folder = tempfile.mkdtemp(prefix="kd-ray-", dir="/tmp")
        self.joined = threading.Event()

    @property
    def address(self) -> str:
        """Return the head's address; its name may not resolve before it is up."""
        return f"{socket.gethostbyname(self.hosts.first)}:{self.hosts.ports[0]}"

    def command(self) -> list[str]:
        ip = socket.gethostbyname(self.hosts.me)
        common = ["--node-ip-address", ip, "--num-cpus", str(num_decoders(self.hosts))]
        if ip.startswith("127."):
            common += ["--object-store-memory", str(256 * 2**20)]
        if self.head:
            port = self.address.rpartition(":")[2]
            role = ["--head", "--port", port, "--include-dashboard", "false"]
            role += ["--temp-dir", self.folder]
            # else Ray also serves clients, on a port that may be in use
            if find_spec("grpc") is not None:
                role += ["--ray-client-server-port", str(free_ports(1)[0])]
        else:
            role = ["--address", self.address]
        ray_start = [sys.executable, "-m", "ray.scripts.scripts", "start"]
        return [*ray_start, *role, *common, *RAY_OPTIONS.split()]

    def start(self) -> bool:
        """Start Ray's processes and return whether they have joined the cluster."""
        environ = {**os.environ, **marks(self.mark), **marks(self.mark, RAY_MARK)}
        environ |= {"RAY_gcs_rpc_server_reconnect_timeout_s": "10"}
        process = subprocess.run(
            self.command(),
            env=environ,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if process.returncode == 0:
            self.joined.set()
        else:
            output = process.stdout.decode(errors="replace").strip()[-2000:]
            say(self.hosts.me, f"Ray does not start here: {output}")
        return process.returncode == 0

    def meet(self) -> None:
        """Wait until the head listens, at most `MEET_SECONDS`."""
        deadline = time.monotonic() + MEET_SECONDS
        while True:
            try:
                return reach(self.address)
            # its name cannot be resolved yet, or it does not listen yet
            except OSError as error:
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
        """Keep this host in the cluster until the head is gone."""
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
        for pid in marked_processes(self.mark, RAY_MARK):
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip()
                if name == "raylet":
                    return True
        return False

    def wait_for_all(self) -> None:
        from kd.cluster.ray_cluster import joined_hosts

        total = len(self.hosts.trainers) + len(self.hosts.data)
        joined = joined_hosts(total, JOIN_SECONDS)
        if joined < total:
            say(
                self.hosts.me,
                f"{joined} of {total} hosts have joined in {JOIN_SECONDS:g} s;"
                " training begins",
            )


def reach(address: str) -> None:
    """Connect to the head once.

    Raises:
        ConnectionRefusedError: The head does not listen, but its host responds.
        OSError: Its host does not respond.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=5).close()


def num_decoders(hosts: Hosts, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of decoders here, one per core that trainers leave free."""
    if "KD_DECODERS" in environ:
        return int(environ["KD_DECODERS"])
    if hosts.me in hosts.data:
        return cores()
    trainers = num_trainers(environ)
    if trainers > 1 or has_accelerator():
        return max(0, cores() - trainers)
    return min(1, cores() - 1)


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
    # the trainers got it too, and need images to finish a step
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    node.meet()
    node.keep_joined()
    say(node.hosts.me, "training has ended")
    return 0


def train(node: Node, argv: Sequence[str]) -> int:
    """Run this host's trainers and return their exit code."""
    stopped = threading.Event()
    process = None

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
    trainers = json.dumps(node.hosts.trainers)
    environ = {**os.environ, **marks(node.mark), "SM_HOSTS": trainers}
    process = subprocess.Popen(command(node.hosts, argv), env=environ)
    if stopped.is_set():  # the signal may arrive between the two lines above
        process.terminate()
    code = process.wait()
    return code if code >= 0 else 128 - code


def command(hosts: Hosts, argv: Sequence[str]) -> list[str]:
    """Return the command of this host's trainers.

    It is `kd-train ARGV`, or the module at the start of ARGV.
    """
    count = num_trainers()
    script = list(argv) if argv[:1] == ["-m"] else ["-m", "kd.cli", "train", *argv]
    if len(hosts.trainers) * count == 1:
        return [sys.executable, *script]
    rank = hosts.trainers.index(hosts.me)
    world = (
        f"--nnodes {len(hosts.trainers)} --node-rank {rank} --nproc-per-node {count}"
        f" --master-addr {hosts.first} --master-port {hosts.ports[1]}"
    )
    return [sys.executable, "-m", "torch.distributed.run", *world.split(), *script]


def empty_config() -> Path:
    """Write a configuration without a key, in a new private folder."""
    # the temporary folder is shared
    file = Path(tempfile.mkdtemp(prefix="kd-"), "kd-empty.yaml")
    file.write_text("{}\n", encoding="utf-8")
    return file


def main(argv: Sequence[str]) -> int:
    """Do this host's part of a job, and return the exit code."""
    argv = list(argv)
    try:
        if argv == ["train"]:  # SageMaker's only argument, beside hyperparameters
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
