"""Which HTTP server does kd-serve stand on: attacks, ends, latency, start and size of
three, by public options alone.

Run: python benchmarks/servers.py EXPORT IMAGE [--before CHECKOUT] [--ends 200] [--seconds 3] [--only PART ...]

The same application of kd is served by kd-serve (granian, embedded), uvicorn with
httptools, and hypercorn. CHECKOUT is an older copy of kd, whose kd-serve takes part
too. Parts:

- `attack`: health checks on new connections for some seconds beside each kind of
  tests/e2e/attacker.py; a check that takes longer than 3 s has failed. Memory is the
  server's at the end of the attack.
- `end`: SIGTERM at a random moment under eight clients that never pause, with a
  connection per request or kept ones. `accepted`: requests that the application
  answered, by its log; `answered`: those of them whose answer arrived. `reset`: new
  connections that were closed before the server read a request, in the moment in which
  the port closes.
- `latency`: one and eight clients in turns, IMAGE as it is.
- `start`: seconds from the start of a process until /ping says 200; the packages' size
  on disk.
- `facts`: of 2026-11-29, from PyPI's index: releases within a year, wheels, licence.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from _load import Server, closed_loop, percentile, request

from _record import write

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))
import attacker

Row = dict[str, Any]
LATE = 3.0  # seconds after which a health check has failed
TURNS = 5
PACKAGES = {
    "kd-serve": ["granian", "click"],
    "uvicorn": ["uvicorn", "httptools", "h11", "click"],
    "hypercorn": [
        "hypercorn",
        "h11",
        "h2",
        "hpack",
        "hyperframe",
        "priority",
        "wsproto",
    ],
}
FACTS = {
    "kd-serve": {
        "releases": 20,
        "wheels": "Linux x86-64 and ARM, macOS, Windows",
        "licence": "BSD-3-Clause",
    },
    "uvicorn": {
        "releases": 22,
        "wheels": "any; httptools as granian",
        "licence": "BSD-3-Clause",
    },
    "hypercorn": {"releases": 0, "wheels": "any", "licence": "MIT"},
}
OTHERS = """
import asyncio, signal, socket, sys, threading
from pathlib import Path
from kd.deploy.serve import app
from kd.deploy.serve.cascade import describe_pair
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.logs import to_stderr
from kd.deploy.serve.service import Service

which, folder = sys.argv[1], Path(sys.argv[2])
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
log = to_stderr(False, "text")
description, second = describe_pair(folder)
service = Service(description, Limits(), 2, 1, second)
service.metrics.watch_log(log)
application = app.build(service)
threading.Thread(target=service.load, daemon=True).start()

async def uvicorn():
    import uvicorn
    config = uvicorn.Config(
        application, port=port, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False,
        timeout_keep_alive=75, timeout_graceful_shutdown=25, backlog=1024, h11_max_incomplete_event_size=65536,
    )
    await uvicorn.Server(config).serve()

async def hypercorn():
    from hypercorn.asyncio import serve
    from hypercorn.config import Config
    config = Config()
    config.bind, config.backlog = [f"127.0.0.1:{port}"], 1024
    config.keep_alive_timeout, config.graceful_timeout, config.errorlog = 75, 25, None
    config.keep_alive_max_requests = 10**9
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await serve(application, config, shutdown_trigger=stop.wait)

print(f"at http://127.0.0.1:{port} ", flush=True)
try:
    asyncio.run({"uvicorn": uvicorn, "hypercorn": hypercorn}[which]())
finally:
    service.close()
"""


class Candidate:
    """A way to serve an export."""

    def __init__(self, name: str, export: Path, before: Path | None = None) -> None:
        self.name = name
        self._export = export
        self._root = before or Path(__file__).resolve().parents[1]

    def start(self, log: Path | None = None) -> tuple[Server, float]:
        """Start a server; return it when it is ready, and the seconds that this took.
        `log`: the file of its log.
        """
        begin = time.perf_counter()
        argv = [
            sys.executable,
            "-m",
            "kd.cli",
            "serve",
            str(self._export),
            "--port",
            "0",
            "--slots",
            "2",
        ]
        argv += ["--threads", "2", *["--quiet"] * (log is None)]
        if self.name in ("uvicorn", "hypercorn"):
            argv = [sys.executable, "-c", OTHERS, self.name, str(self._export)]
        environment = {**os.environ, "PYTHONPATH": str(self._root)}
        with (log or Path(os.devnull)).open("w") as lines:
            process = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=lines, text=True, env=environment
            )
        assert process.stdout is not None
        base = process.stdout.readline().split("at ")[1].split()[0]
        server = Server(process, f"{base}/invocations")
        while ping(server)[1] != 200:
            time.sleep(0.02)
        return server, time.perf_counter() - begin


def ping(server: Server) -> tuple[float, int | str]:
    """Return the seconds of a health check on a new connection, and its status or what
    went wrong.
    """
    address = urlsplit(server.url)
    begin = time.perf_counter()
    connection = http.client.HTTPConnection(
        str(address.hostname), address.port, timeout=LATE
    )
    try:
        connection.request("GET", "/ping")
        status: int | str = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        status = type(error).__name__
    finally:
        connection.close()
    return time.perf_counter() - begin, status


def attacks(candidates: list[Candidate], options: argparse.Namespace) -> list[Row]:
    """Attack a new server of each candidate with each kind."""
    rows = []
    for kind in attacker.ATTACKS:
        for candidate in candidates:
            server, _ = candidate.start()
            before = server.resident_mb()
            argv = [
                sys.executable,
                attacker.__file__,
                kind,
                str(urlsplit(server.url).port),
            ]
            attack = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
            assert attack.stdout is not None
            attack.stdout.readline()
            end = time.perf_counter() + options.seconds
            checks = []
            while time.perf_counter() < end:
                checks.append(ping(server))
                time.sleep(0.05)
            row: Row = {
                "part": "attack",
                "which": kind,
                "server": candidate.name,
                "checks": len(checks),
            }
            row["failed"] = sum(status != 200 for _, status in checks)
            row["slowest_s"] = round(max(took for took, _ in checks), 3)
            row |= {"mb_before": round(before), "mb_after": round(server.resident_mb())}
            attack.kill()
            attack.communicate()
            stop(server)
            rows.append(row)
            print(row, flush=True)
    return rows


def stop(server: Server) -> None:
    """End a server, also one that does not react."""
    try:
        server.process.wait(0)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()


def ends(candidates: list[Candidate], options: argparse.Namespace) -> list[Row]:
    """Send SIGTERM under load, again and again."""
    rows = []
    rng = random.Random(0)
    body = options.image.read_bytes()
    for candidate in candidates:
        for keep_open in (False, True):
            totals: Counter[str] = Counter()
            for _ in range(
                options.ends if candidate.name == "kd-serve" else options.ends // 10
            ):
                totals += one_end(candidate, body, keep_open, rng.uniform(0.1, 0.6))
            kind = "kept connections" if keep_open else "a connection a request"
            row = {"part": "end", "which": kind, "server": candidate.name, **totals}
            rows.append(row)
            print(row, flush=True)
    return rows


def one_end(
    candidate: Candidate, body: bytes, keep_open: bool, after: float
) -> Counter[str]:
    """Count answers and losses of eight clients, one of whose servers ends."""
    log = Path(tempfile.gettempdir()) / "end.log"
    server, _ = candidate.start(log)
    target = urlsplit(server.url)
    counts = Counter[str]()
    gone = threading.Event()
    address = (str(target.hostname), target.port or 0)

    def client() -> None:
        connection: http.client.HTTPConnection | None = None
        while not gone.is_set():
            fresh = connection is None
            try:
                if connection is None:
                    connection = http.client.HTTPConnection(*address, timeout=30)
                    connection.connect()
                    assert connection.sock is not None
                    connection.sock.setsockopt(
                        socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
                    )
            except OSError:  # refused: the server did not take it
                return
            try:
                connection.request(
                    "POST", "/invocations", body, {"content-type": "image/jpeg"}
                )
                answer = connection.getresponse()
                answer.read()
                counts[
                    "answered" if answer.status == 200 else f"status {answer.status}"
                ] += 1
                if not keep_open or answer.will_close:
                    connection.close()
                    connection = None
            except (OSError, http.client.HTTPException):
                connection.close()
                connection = None
                if fresh:
                    counts["reset"] += 1
                else:
                    counts["closed between two requests"] += 1

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(after)
    server.process.terminate()
    begin = time.perf_counter()
    code = server.process.wait(60)
    counts["slow ends"] += time.perf_counter() - begin > 5
    counts["exit codes other than 0"] += code != 0
    gone.set()
    for thread in threads:
        thread.join()
    counts["ends"] += 1
    counts["accepted"] += log.read_text().count(" invocations 200 ")
    return counts


def latency(candidates: list[Candidate], options: argparse.Namespace) -> list[Row]:
    """One and eight clients; all servers are open and take turns."""
    body = options.image.read_bytes()
    rows = []
    servers = {candidate.name: candidate.start()[0] for candidate in candidates}
    for turn in range(TURNS):
        for name, server in list(servers.items())[:: 1 if turn % 2 else -1]:
            message = request(server.url, body, "image/jpeg")
            for clients in (1, 8):
                asyncio.run(closed_loop(server.url, message, clients, 0.3))
                cpu_seconds = server.cpu_seconds()
                answers = asyncio.run(
                    closed_loop(server.url, message, clients, options.seconds)
                )
                cpu_seconds = server.cpu_seconds() - cpu_seconds
                waits = [1000 * answer.took for answer in answers]
                assert {answer.status for answer in answers} == {200}
                row = {
                    "part": "latency",
                    "which": f"{clients} clients",
                    "server": name,
                    "turn": turn,
                }
                row |= {
                    "p50_ms": round(percentile(waits, 0.5), 2),
                    "p99_ms": round(percentile(waits, 0.99), 2),
                }
                row |= {"images_per_s": round(len(answers) / options.seconds, 1)}
                row["cpu_ms"] = round(1000 * cpu_seconds / len(answers), 2)
                rows.append(row)
                print(row, flush=True)
    for server in servers.values():
        stop(server)
    return rows


def starts(candidates: list[Candidate], options: argparse.Namespace) -> list[Row]:
    """Start each candidate a few times."""
    rows = []
    for turn in range(TURNS):
        for candidate in candidates:
            server, seconds = candidate.start()
            row = {
                "part": "start",
                "which": "",
                "server": candidate.name,
                "turn": turn,
                "start_s": round(seconds, 2),
            }
            row |= {
                "mb_after": round(server.resident_mb()),
                "installed_mb": installed(candidate.name),
            }
            stop(server)
            rows.append(row)
            print(row, flush=True)
    return rows


def facts(candidates: list[Candidate], options: argparse.Namespace) -> list[Row]:
    """Return what an index says about each candidate."""
    return [
        {"part": "facts", "which": "", "server": name, **row}
        for name, row in FACTS.items()
    ]


def installed(name: str) -> float | str:
    """Return the size of a candidate's packages, MB of 10^6 bytes."""
    total = 0
    for package in PACKAGES.get(name, []):
        try:
            files = distribution(package).files or []
        except PackageNotFoundError:
            return ""
        paths = [Path(str(path.locate())) for path in files]
        total += sum(path.stat().st_size for path in paths if path.is_file())
    return round(total / 1e6, 1) if total else ""


PARTS = {
    "attack": attacks,
    "end": ends,
    "latency": latency,
    "start": starts,
    "facts": facts,
}


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("export", type=Path)
    parser.add_argument("image", type=Path, help="a JPEG")
    parser.add_argument("--before", type=Path, help="an older copy of kd")
    parser.add_argument(
        "--ends",
        type=int,
        default=200,
        help="SIGTERMs of kd-serve; a tenth of it for the others",
    )
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", action="append", choices=sorted(PARTS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        candidates = [
            Candidate(name, options.export)
            for name in ("kd-serve", "uvicorn", "hypercorn")
        ]
        if options.before:
            candidates.append(
                Candidate("kd-serve before", options.export, options.before)
            )
        rows = [
            row
            for section in options.only or PARTS
            for row in PARTS[section](candidates, options)
        ]
    command = (
        f"python benchmarks/servers.py EXPORT IMAGE --ends {options.ends} --seconds"
        f" {options.seconds:g}"
    )
    write("server", command + " --before CHECKOUT" * bool(options.before), rows)


if __name__ == "__main__":
    main()
