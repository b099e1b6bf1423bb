"""One host of a job: `python -m kd.cluster.group [-m MODULE] CONFIG [key=value ...]`, the same on all hosts.

The first trainer runs the head of a Ray cluster, which all hosts join, and the meeting point (`kd.cluster.meeting`).
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
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
from kd.cluster.meeting import JoinedHost, Meeting, say
from kd.core.errors import KdError
from kd.core.host import cores

RAY_MARK = "KD_RAY"  # like `kd.cluster.hosts.MARK`, of Ray's processes only
QUIET = {"RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}
"""Ray prints pages about each lost host in the log of a run; `data.loader` prints a line."""
GRACE_SECONDS = 30.0  # how long a trainer may take to end by itself after another one has failed


# ------------------------------------------------------------------------------------------------------------ Ray


class Node:
    """This host's part of the Ray cluster. Ray gets no accelerator: torchrun uses them."""

    def __init__(self, hosts: Hosts, mark: str) -> None:
        self.hosts, self.mark, self.head, self.failures = hosts, mark, hosts.me == hosts.first, 0
        self.folder = tempfile.mkdtemp(prefix="kd-ray-", dir="/tmp") if self.head else ""  # sockets need short paths

    @property
    def address(self) -> str:
        """Of the head; its name may not be known before this host has joined."""
        return f"{socket.gethostbyname(self.hosts.first)}:{self.hosts.ports[1]}"

    def command(self) -> list[str]:
        """Return the command that starts Ray here."""
        own = socket.gethostbyname(self.hosts.me)
        common = ["--node-ip-address", own, "--num-cpus", str(num_decoders(self.hosts)), "--num-gpus", "0"]
        common += ["--min-worker-port", "0", "--max-worker-port", "0", "--include-log-monitor", "false"]
        if own.startswith("127."):
            common += ["--object-store-memory", str(256 * 2**20)]
        if self.head:
            port = self.address.rpartition(":")[2]
            role = ["--head", "--port", port, "--include-dashboard", "false", "--temp-dir", self.folder]
            if find_spec("grpc") is not None:  # Ray then also serves clients, by default on a port that may be in use
                role += ["--ray-client-server-port", str(free_ports(1)[0])]
        else:
            role = ["--address", self.address]
        return [sys.executable, "-m", "ray.scripts.scripts", "start", *role, *common, "--disable-usage-stats"]

    async def start(self) -> bool:
        """Start Ray's processes and return whether they have joined the cluster."""
        environ = {**os.environ, **marks(self.mark), **marks(self.mark, RAY_MARK)}
        environ |= {"RAY_gcs_rpc_server_reconnect_timeout_s": "10"}
        process = await asyncio.create_subprocess_exec(
            *self.command(),
            env=environ,
            start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        self.failures = self.failures + 1 if process.returncode else 0
        if self.failures == (1 if self.head else 20):  # the others fail until the head runs
            say(self.hosts.me, f"Ray does not start here: {output.decode(errors='replace').strip()[-2000:]}")
        return process.returncode == 0

    async def keep_joined(self, member: JoinedHost) -> None:
        """Join the cluster, and join it again whenever Ray has ended here."""
        while True:
            if await self.start():
                member.send("ready")
                while self._alive():
                    await asyncio.sleep(1)
                say(self.hosts.me, "Ray has ended here; it is started again")
            await asyncio.get_running_loop().run_in_executor(None, end_marked, self.mark, RAY_MARK)
            await asyncio.sleep(1)

    def _alive(self) -> bool:
        for pid in marked(self.mark, RAY_MARK):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip() == "raylet":
                    return True
        return False


def num_decoders(hosts: Hosts, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of decoders on this host: one per core; on a trainer, the cores that its trainers leave."""
    if "KD_DECODERS" in environ:
        return int(environ["KD_DECODERS"])
    if hosts.me in hosts.data:
        return cores()
    trainers = processes(environ)
    return max(0, cores() - trainers) if trainers > 1 or accelerated() else min(1, cores() - 1)


# ----------------------------------------------------------------------------------------------------------- roles


async def run(hosts: Hosts, argv: Sequence[str]) -> int:
    """Do this host's part of a job with a data group, and return its exit code."""
    mark = secrets.token_hex(8)
    meeting = asyncio.create_task(Meeting(hosts).run()) if hosts.me == hosts.first else None
    node = Node(hosts, mark)
    try:
        member = await JoinedHost.join(hosts)
        code = await (train(member, node, argv) if hosts.me in hosts.trainers else decode(member, node))
        await member.close()
        if meeting is not None:
            await meeting
        return code
    finally:
        end_marked(mark)
        if node.folder:
            shutil.rmtree(node.folder, ignore_errors=True)


async def decode(member: JoinedHost, node: Node) -> int:
    """Run decoders until the training has ended; return 0 if it ended well."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the trainers get it too, and need their images to finish a step
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    keeper = asyncio.create_task(node.keep_joined(member))
    code = await member.ended
    keeper.cancel()
    say(node.hosts.me, "training has ended" if code == 0 else f"training has failed ({code})")
    return min(1, code)


async def train(member: JoinedHost, node: Node, argv: Sequence[str]) -> int:
    """Run this host's trainers; return their exit code, or that of another host."""
    process: asyncio.subprocess.Process | None = None

    def stop() -> None:
        if process is None:
            member.end(1)
        elif process.returncode is None:
            process.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    keeper = None
    if not node.head:
        keeper = asyncio.create_task(node.keep_joined(member))
    elif await node.start():
        member.send("ready")
    else:
        member.end(1)
    await asyncio.wait([member.begun, member.ended], return_when=asyncio.FIRST_COMPLETED)
    code = 1
    if not member.ended.done():
        environ = {**os.environ, **marks(node.mark), "RAY_ADDRESS": node.address, **QUIET}
        environ["SM_HOSTS"] = json.dumps(node.hosts.trainers)
        process = await asyncio.create_subprocess_exec(*command(node.hosts, argv), env=environ)
        code = await _exit_code(process, member)
        member.send(f"done {code}")
        code = code or await member.ended
    if keeper is not None:
        keeper.cancel()
    return code


async def _exit_code(process: asyncio.subprocess.Process, member: JoinedHost) -> int:
    """Wait for the trainers. End them if trainers of another host have failed."""
    waiting = asyncio.ensure_future(process.wait())
    await asyncio.wait([waiting, member.ended], return_when=asyncio.FIRST_COMPLETED)
    for end in (process.terminate, process.kill):
        if not waiting.done():
            await asyncio.wait([waiting], timeout=GRACE_SECONDS)
        if not waiting.done():
            end()
    code = await waiting
    return code if code >= 0 else 128 - code


def command(hosts: Hosts, argv: Sequence[str]) -> list[str]:
    """Return the command of this host's trainers: `kd-train ARGV`, or the module that ARGV begins with."""
    count = processes()
    script = list(argv) if argv[:1] == ["-m"] else ["-m", "kd.cli", "train", *argv]
    if len(hosts.trainers) * count == 1:
        return [sys.executable, *script]
    world = ["--nnodes", len(hosts.trainers), "--node-rank", hosts.trainers.index(hosts.me)]
    world += ["--nproc-per-node", count, "--master-addr", hosts.first, "--master-port", hosts.ports[2]]
    return [sys.executable, "-m", "torch.distributed.run", *map(str, world), *script]


def empty_config() -> Path:
    """Write a configuration without a key, in a new folder of our own: anybody writes into the temporary one."""
    file = Path(tempfile.mkdtemp(prefix="kd-"), "kd-empty.yaml")
    file.write_text("{}\n", encoding="utf-8")
    return file


def main(argv: Sequence[str]) -> int:
    """Do this host's part of a job. SageMaker starts a container with `train` alone; then take the hyperparameters."""
    argv = list(argv)
    try:
        if argv == ["train"]:
            argv = [str(empty_config()), *hyperparameters()]
        hosts = read_hosts()
        if not hosts.data:
            os.environ["SM_HOSTS"] = json.dumps(hosts.trainers)
            os.execv(sys.executable, command(hosts, argv))
        return asyncio.run(run(hosts, argv))
    except KdError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
