"""How the hosts of a job agree when training begins and how it has ended.

Each host keeps one TCP connection to the first trainer. A connection that breaks, or is silent for a minute, counts as
a failure, so a host that dies is noticed too. Lines of a host: its name and the token, `ready`, `done CODE` (trainers
only). Answers: `go`, `end CODE`. An empty line is a sign of life.

The token is Ray's (`RAY_AUTH_TOKEN`). It is sent as it is, as Ray sends it. Without one, whoever reaches the port and
knows a host's name counts as that host.
"""

from __future__ import annotations

import asyncio
import hmac
import sys
from collections.abc import Sequence
from contextlib import suppress

from kd.cluster.hosts import Hosts
from kd.core.errors import BackendError

BEAT_SECONDS, SILENCE_SECONDS = 5.0, 60.0
"""Time between two signs of life, and time without one after which a host is lost."""
FIRST_LINE_SECONDS = 10.0  # how long a connection may take to send its first line
JOIN_SECONDS = 300.0  # how long trainers wait for hosts that have not joined; then training begins without them
MEET_SECONDS = 900.0  # how long a host tries to reach the first trainer: hosts of a job start minutes apart


def say(host: str, text: str) -> None:
    """Print a line of a host."""
    print(f"[{host}] {text}", file=sys.stderr, flush=True)


def _send(writer: asyncio.StreamWriter, line: str) -> None:
    with suppress(OSError, RuntimeError):
        writer.write(f"{line}\n".encode())


class Meeting:
    """The first trainer's end of all connections."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.code: int | None = None
        """The job's exit code; None while it runs."""
        self._training, self._absent = set(hosts.trainers), {*hosts.trainers, *hosts.data}
        self._met: set[str] = set()
        """Trainers that have connected. They do so once: a trainer whose connection breaks has failed."""
        self._refused: set[str] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until all hosts have read how the job ended."""
        server = await asyncio.start_server(self._serve, self.hosts.first, self.hosts.ports[0])
        late = asyncio.get_running_loop().call_later(JOIN_SECONDS, self._begin)
        while self.code is None:
            self._send_all("")
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), BEAT_SECONDS)
        late.cancel()
        for _ in range(50):  # a host closes its connection when it has read the end
            if self._writers:
                await asyncio.sleep(0.1)
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = await self._admitted(reader)
        if not name:
            writer.close()
            return
        self._writers.add(writer)
        try:
            while line := await asyncio.wait_for(reader.readline(), SILENCE_SECONDS):
                self._handle(name, line.split())
        except (asyncio.TimeoutError, OSError, ValueError):  # ValueError: a line without end
            say(self.hosts.me, f"{name} does not answer any more")
        finally:
            self._writers.discard(writer)
            writer.close()
        if name in self._training:
            self._end(1)

    async def _admitted(self, reader: asyncio.StreamReader) -> str:
        """Read the first line of a connection and return the host's name; "" for a stranger."""
        try:
            line = await asyncio.wait_for(reader.readline(), FIRST_LINE_SECONDS)
            name, _, token = line.decode().strip().partition(" ")
        except (asyncio.TimeoutError, OSError, ValueError):
            return ""
        if name not in {*self.hosts.trainers, *self.hosts.data}:
            return ""
        wrong = ""
        if not hmac.compare_digest(token.encode(), self.hosts.token.encode()):
            wrong = "its RAY_AUTH_TOKEN differs"
        elif name in self._met:
            wrong = "this trainer has connected before"
        elif name in self.hosts.trainers:
            self._met.add(name)
        if wrong and name not in self._refused:
            self._refused.add(name)
            say(self.hosts.me, f"a connection as {name} is refused: {wrong}")
        return "" if wrong else name

    def _handle(self, name: str, words: Sequence[bytes]) -> None:
        match words:
            case [b"ready"]:
                self._absent.discard(name)
                if not self._absent:
                    self._begin()
            case [b"done", code] if code.isdigit() and name in self.hosts.trainers:
                self._training.discard(name)
                if int(code) or not self._training:
                    self._end(int(code))

    def _begin(self) -> None:
        if self._absent:
            names = ", ".join(sorted(self._absent))
            say(self.hosts.me, f"{names} did not join within {JOIN_SECONDS:g} seconds; training begins")
        self._absent = set()
        self._send_all("go")

    def _end(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self._send_all(f"end {code}")
            self._ended.set()

    def _send_all(self, line: str) -> None:
        for writer in self._writers:
            _send(writer, line)


class JoinedHost:
    """A host's end of its connection to the first trainer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        """The job's exit code; 1 if the first trainer is lost."""
        self._tasks = [loop.create_task(self._listen()), loop.create_task(self._beat())]

    @classmethod
    async def join(cls, hosts: Hosts) -> JoinedHost:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + MEET_SECONDS
        while True:
            try:
                member = cls(*await asyncio.open_connection(hosts.first, hosts.ports[0]))
            except OSError as error:  # its name cannot be resolved yet, or it does not listen yet
                if loop.time() > deadline:
                    wrong = f"host '{hosts.me}' cannot reach the first trainer ({error})"
                    remedy = "A private VPC must allow all TCP between the hosts of a job"
                    raise BackendError(f"{hosts.first}:{hosts.ports[0]}", wrong, "", remedy) from error
                await asyncio.sleep(0.5)
                continue
            member.send(f"{hosts.me} {hosts.token}")
            return member

    def send(self, line: str) -> None:
        _send(self._writer, line)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        with suppress(OSError):
            await self._writer.drain()
            self._writer.close()

    def end(self, code: int) -> None:
        """Note how the job ended; only the first call counts."""
        if not self.ended.done():
            self.ended.set_result(code)

    async def _listen(self) -> None:
        with suppress(asyncio.TimeoutError, OSError):
            while line := await asyncio.wait_for(self._reader.readline(), SILENCE_SECONDS):
                words = line.decode().split()
                if words[:1] == ["go"] and not self.begun.done():
                    self.begun.set_result(None)
                elif words[:1] == ["end"]:
                    self.end(int(words[1]))
        self.end(1)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self.send("")
