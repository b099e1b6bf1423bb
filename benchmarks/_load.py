"""Requests to an endpoint, closed loop and open loop, from one light process: latencies
and statuses, nothing else.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

PERIOD = 0.02


@dataclass(frozen=True, slots=True)
class Answer:
    """One request."""

    began: float
    """Seconds since the start of the load; of an open loop, when it was due."""
    took: float
    """Seconds, with the time it waited to be sent."""
    status: int
    """0: the connection broke."""


def request(url: str, body: bytes, kind: str) -> bytes:
    """Return the bytes of a POST request."""
    address = urlsplit(url)
    head = (
        f"POST {address.path} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type:"
        f" {kind}\r\ncontent-length: {len(body)}"
    )
    return f"{head}\r\naccept: application/json\r\n\r\n".encode() + body


async def answered(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes
) -> tuple[int, bytes]:
    """Send a request, read the answer to its end, return its status and body."""
    writer.write(message)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        (
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        ),
        0,
    )
    body = await reader.readexactly(length)
    return int(head.split(b" ", 2)[1]), body


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes
) -> int:
    """Send a request, read the answer to its end, return its status."""
    return (await answered(reader, writer, message))[0]


async def closed_loop(
    url: str, message: bytes, clients: int, seconds: float
) -> list[Answer]:
    """Let `clients` send one request after another."""
    address = urlsplit(url)
    start = time.perf_counter()
    answers = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        while (begin := time.perf_counter()) - start < seconds:
            status = await exchange(reader, writer, message)
            answers.append(Answer(begin - start, time.perf_counter() - begin, status))
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


async def open_loop(
    url: str, message: bytes, rate: float, seconds: float, seed: int = 0
) -> list[Answer]:
    """Send requests at Poisson times, whether or not earlier ones were answered."""
    address = urlsplit(url)
    rng = random.Random(seed)
    due = 0.0
    times = []
    while (due := due + rng.expovariate(rate)) < seconds:
        times.append(due)
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    start = time.perf_counter()
    answers = []
    tasks = set()

    async def request_at(due: float) -> None:
        status = 0
        try:
            pair = (
                idle.pop()
                if idle
                else await asyncio.open_connection(address.hostname, address.port)
            )
            status = await exchange(*pair, message)
            idle.append(pair)
        except (OSError, asyncio.IncompleteReadError):
            pass
        answers.append(Answer(due, time.perf_counter() - start - due, status))

    for due in times:
        wait = start + due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        task = asyncio.ensure_future(request_at(due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    for _, writer in idle:
        writer.close()
    return answers


def percentile(values: list[float], share: float) -> float:
    """Return the nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(slots=True)
class Server:
    """A server process and all it started."""

    process: subprocess.Popen
    url: str

    def pids(self) -> list[int]:
        """Return the process and its descendants."""
        children: dict[int, list[int]] = {}
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    parent = int(
                        (path / "stat").read_text().rpartition(")")[2].split()[1]
                    )
                except OSError:
                    continue
                children.setdefault(parent, []).append(int(path.name))
        tree = []
        queue = [self.process.pid]
        while queue:
            tree.append(pid := queue.pop())
            queue += children.get(pid, [])
        return tree

    def cpu_seconds(self) -> float:
        """Return user and system time so far."""
        ticks = 0
        for pid in self.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / 100

    def resident_mb(self, peak: bool = False) -> float:
        """Return the resident memory of all processes together."""
        key = "VmHWM:" if peak else "VmRSS:"
        total = 0
        for pid in self.pids():
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                total += int(line.split()[1]) if line.startswith(key) else 0
        return total / 1024

    def stop(self) -> None:
        """End it and what it started."""
        pids = self.pids()
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in pids[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kd_serve(folder: Path, *options: str) -> Server:
    """Start kd-serve on a free port and wait until it answers."""
    argv = [
        sys.executable,
        "-m",
        "kd.cli",
        "serve",
        str(folder),
        "--port",
        "0",
        "--quiet",
        *options,
    ]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    base = process.stdout.readline().split(" at ")[1].split()[0]
    server = Server(process, f"{base}/invocations")
    wait_ready(f"{base}/ping", process)
    return server


def wait_ready(url: str, process: subprocess.Popen, seconds: float = 60) -> None:
    """Wait until a health route answers 200."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(PERIOD)
    raise SystemExit(f"{url} did not answer within {seconds} s")
