"""One host of a job: `python -m kd.sagemaker.group [-m MODULE] CONFIG [key=value ...]`, the same on all hosts.

The first trainer runs the head of a Ray cluster, which all hosts join, and a meeting point: each host keeps one TCP
connection to it. Trainers tell it how their part of the training ended, and it tells all hosts how the whole ended. A
connection that breaks, or is silent for a minute, is the same as a failure, so a host that dies hard is noticed too.
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
from pathlib import Path

from kd.errors import BackendError, KdError
from kd.host import cores
from kd.sagemaker.hosts import (
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

BEAT, SILENCE = 5.0, 60.0
"""Seconds between two signs of life, and without one until a host counts as lost."""
JOIN_SECONDS = 300.0
"""How long trainers wait for hosts that have not joined; then they begin without them."""
MEET_SECONDS = 900.0
"""How long a host tries to reach the first trainer: hosts of a job start minutes apart."""
RAY_MARK = "KD_RAY"
"""As `kd.sagemaker.hosts.MARK`, of Ray's processes alone."""
QUIET = {"RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}
"""Ray prints pages about each lost host in the log of a run; `data.loader` tells it in a line."""
GRACE = 30.0
"""Seconds that a trainer has to end by itself when another one has failed."""


class Meeting:
    """The first trainer's end of all connections. Lines: `HOST`, `ready`, `done CODE`; back: `go`, `end CODE`."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.code: int | None = None
        """How the job ended; None: it has not."""
        self._left, self._absent = set(hosts.trainers), {*hosts.trainers, *hosts.data}
        self._writers: set[asyncio.StreamWriter] = set()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until the end was told to everyone."""
        server = await asyncio.start_server(self._serve, self.hosts.first, self.hosts.ports[0])
        late = asyncio.get_running_loop().call_later(JOIN_SECONDS, self._begin)
        while self.code is None:
            self._tell("")
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), BEAT)
        late.cancel()
        for _ in range(50):  # each host leaves when it has read how it ended
            if self._writers:
                await asyncio.sleep(0.1)
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = (await reader.readline()).decode().strip()
        if name not in {*self.hosts.trainers, *self.hosts.data}:
            writer.close()
            return
        self._writers.add(writer)
        try:
            while line := await asyncio.wait_for(reader.readline(), SILENCE):
                self._heard(name, line.decode().split())
        except (asyncio.TimeoutError, OSError):
            say(self.hosts.me, f"{name} does not answer any more")
        finally:
            self._writers.discard(writer)
            writer.close()
        if name in self._left:
            self._end(1)

    def _heard(self, name: str, words: Sequence[str]) -> None:
        if words[:1] == ["ready"]:
            self._absent.discard(name)
            if not self._absent:
                self._begin()
        elif words[:1] == ["done"]:
            self._left.discard(name)
            if words[1] != "0" or not self._left:
                self._end(int(words[1]))

    def _begin(self) -> None:
        if self._absent:
            told = f"{', '.join(sorted(self._absent))} did not join within {JOIN_SECONDS:g} seconds; training begins"
            say(self.hosts.me, told)
        self._absent = set()
        self._tell("go")

    def _end(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self._tell(f"end {code}")
            self._ended.set()

    def _tell(self, line: str) -> None:
        for writer in self._writers:
            with suppress(OSError, RuntimeError):
                writer.write(f"{line}\n".encode())


class Member:
    """A host's end of its connection to the first trainer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        """How the job ended; 1 where the first trainer is lost."""
        self._tasks = [loop.create_task(self._listen()), loop.create_task(self._beat())]

    @classmethod
    async def join(cls, hosts: Hosts) -> Member:
        """Connect to the first trainer.

        Raises:
            BackendError: it cannot be reached.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + MEET_SECONDS
        while True:
            try:
                member = cls(*await asyncio.open_connection(hosts.first, hosts.ports[0]))
            except OSError as error:  # its name is not known yet, or it does not listen yet
                if loop.time() > deadline:
                    wrong = f"host '{hosts.me}' cannot reach the first trainer ({error})"
                    remedy = "A private VPC must allow all TCP between the hosts of a job"
                    raise BackendError(f"{hosts.first}:{hosts.ports[0]}", wrong, "", remedy) from error
                await asyncio.sleep(0.5)
                continue
            member.tell(hosts.me)
            return member

    def tell(self, line: str) -> None:
        """Send a line."""
        with suppress(OSError, RuntimeError):
            self._writer.write(f"{line}\n".encode())

    async def close(self) -> None:
        """Send what is left and leave."""
        for task in self._tasks:
            task.cancel()
        with suppress(OSError):
            await self._writer.drain()
            self._writer.close()

    def end(self, code: int) -> None:
        """Note how the job ended, once."""
        if not self.ended.done():
            self.ended.set_result(code)

    async def _listen(self) -> None:
        with suppress(asyncio.TimeoutError, OSError):
            while line := await asyncio.wait_for(self._reader.readline(), SILENCE):
                words = line.decode().split()
                if words[:1] == ["go"] and not self.begun.done():
                    self.begun.set_result(None)
                elif words[:1] == ["end"]:
                    self.end(int(words[1]))
        self.end(1)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            self.tell("")


# ------------------------------------------------------------------------------------------------------------ Ray


class Node:
    """This host's part of the Ray cluster. It is told of no accelerator: those are torchrun's."""

    def __init__(self, hosts: Hosts, mark: str) -> None:
        self.hosts, self.mark, self.head, self.failures = hosts, mark, hosts.me == hosts.first, 0
        self.folder = tempfile.mkdtemp(prefix="kd-ray-", dir="/tmp") if self.head else ""  # sockets need short paths
        self.address = f"{socket.gethostbyname(hosts.first)}:{hosts.ports[1]}"

    def command(self) -> list[str]:
        """Return how Ray is started here."""
        own = socket.gethostbyname(self.hosts.me)
        common = ["--node-ip-address", own, "--num-cpus", str(slots(self.hosts)), "--num-gpus", "0"]
        common += ["--min-worker-port", "0", "--max-worker-port", "0", "--include-log-monitor", "false"]
        if own.startswith("127."):
            common += ["--object-store-memory", str(256 * 2**20)]
        if self.head:
            port = self.address.rpartition(":")[2]
            place = ["--head", "--port", port, "--include-dashboard", "false", "--temp-dir", self.folder]
            place += ["--ray-client-server-port", str(free_ports(1)[0])]  # by default one that another cluster may have
        else:
            place = ["--address", self.address]
        return [sys.executable, "-m", "ray.scripts.scripts", "start", *place, *common, "--disable-usage-stats"]

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
        told, _ = await process.communicate()
        self.failures = self.failures + 1 if process.returncode else 0
        if self.failures == (1 if self.head else 20):  # others fail while the head is not there yet
            say(self.hosts.me, f"Ray does not start here: {told.decode(errors='replace').strip()[-2000:]}")
        return process.returncode == 0

    async def keep(self, member: Member) -> None:
        """Join the cluster, and join it again whenever this host has fallen out of it."""
        while True:
            if await self.start():
                member.tell("ready")
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


def slots(hosts: Hosts, environ: Mapping[str, str] = os.environ) -> int:
    """Return how many decoders this host runs: one a core; on a trainer, those that its trainers leave."""
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
        member = await Member.join(hosts)
        code = await (train(hosts, member, node, argv) if hosts.me in hosts.trainers else decode(member, node))
        await member.close()
        if meeting is not None:
            await meeting
        return code
    finally:
        end_marked(mark)
        if node.folder:
            shutil.rmtree(node.folder, ignore_errors=True)


async def decode(member: Member, node: Node) -> int:
    """Serve until the training has ended; return 0 if it ended well."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the trainers get it too, and need their images to finish a step
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    keeper = asyncio.create_task(node.keep(member))
    code = await member.ended
    keeper.cancel()
    say(node.hosts.me, "training has ended" if code == 0 else f"training has failed ({code})")
    return min(1, code)


async def train(hosts: Hosts, member: Member, node: Node, argv: Sequence[str]) -> int:
    """Run this host's trainers; return their exit code, or that of others."""
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
        keeper = asyncio.create_task(node.keep(member))
    elif await node.start():
        member.tell("ready")
    else:
        member.end(1)
    await asyncio.wait([member.begun, member.ended], return_when=asyncio.FIRST_COMPLETED)
    code = 1
    if not member.ended.done():
        environ = {**os.environ, **marks(node.mark), "RAY_ADDRESS": node.address}
        environ |= {"SM_HOSTS": json.dumps(hosts.trainers), **QUIET}
        process = await asyncio.create_subprocess_exec(*command(hosts, argv), env=environ)
        code = await _finished(process, member)
        member.tell(f"done {code}")
        code = code or await member.ended
    if keeper is not None:
        keeper.cancel()
    return code


async def _finished(process: asyncio.subprocess.Process, member: Member) -> int:
    """Return the trainers' exit code; end them where others have failed and they wait for those."""
    waiting = asyncio.ensure_future(process.wait())
    await asyncio.wait([waiting, member.ended], return_when=asyncio.FIRST_COMPLETED)
    for end, seconds in ((process.terminate, GRACE), (process.kill, GRACE)):
        if not waiting.done():
            await asyncio.wait([waiting], timeout=seconds)
        if not waiting.done():
            end()
    code = await waiting
    return code if code >= 0 else 128 - code


def command(hosts: Hosts, argv: Sequence[str]) -> list[str]:
    """Return what runs the trainers of this host: `kd-train ARGV`, or the module that ARGV begins with."""
    count = processes()
    script = list(argv) if argv[:1] == ["-m"] else ["-m", "kd.cli.train", *argv]
    if len(hosts.trainers) * count == 1:
        return [sys.executable, *script]
    place = ["--nnodes", len(hosts.trainers), "--node-rank", hosts.trainers.index(hosts.me)]
    place += ["--nproc-per-node", count, "--master-addr", hosts.first, "--master-port", hosts.ports[2]]
    return [sys.executable, "-m", "torch.distributed.run", *map(str, place), *script]


def say(me: str, text: str) -> None:
    """Print a line of this host."""
    print(f"[{me}] {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Do this host's part of a job; `train` alone, as SageMaker starts a container, takes the hyperparameters."""
    argv = list(argv)
    try:
        if argv == ["train"]:
            argv = ["/tmp/kd-empty.yaml", *hyperparameters()]
            Path(argv[0]).write_text("{}\n", encoding="utf-8")
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
