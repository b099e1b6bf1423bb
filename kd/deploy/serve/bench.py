"""Latency of clients: start `kd-serve` for each file of an export and query all servers
in turns.

Turns spread disturbance by other work evenly. The clients run in this process, on the
same cores.
"""

import http.client
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kd.core.errors import KdError
from kd.core.host import terminate_with_parent

TURN, FEWEST, COLD = 0.3, 8, 3
"""Seconds of a server's turn and its least number of responses; the number of first
responses that do not count, because the caches hold another model.
"""
ENOUGH = 400  # responses of each server after which the time limit no longer matters
START_SECONDS = (
    120.0  # seconds until a server must be ready; chosen: a slower server hangs
)
ANSWER_SECONDS = (
    60.0  # seconds until a response must arrive; chosen: far above any measured one
)


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies of one server's clients, milliseconds."""

    p50_ms: float
    p99_ms: float
    images_per_second: float
    memory_mb: float  # resident memory at the end


def ask(
    folder: Path,
    files: Sequence[str],
    picture: bytes,
    threads: int,
    slots: int,
    seconds: float,
) -> dict[str, Latency]:
    """Send a JPEG repeatedly to one server per file: three turns, then more up to
    `seconds` per file.

    There are 2 x slots clients; one client if there is one slot.
    """
    clients = 1 if slots == 1 else 2 * slots
    took: dict[str, list[float]] = {file: [] for file in files}
    with ExitStack() as stack:
        servers = {
            file: stack.enter_context(server(folder, file, threads, slots))
            for file in files
        }
        pool = stack.enter_context(ThreadPoolExecutor(clients))
        end, turns = time.monotonic() + seconds * len(servers), 0
        while turns < 3 or (
            time.monotonic() < end and min(map(len, took.values())) < ENOUGH
        ):
            turns += 1
            for file, (host, port) in servers.items():
                for times in pool.map(
                    turn, [host] * clients, [port] * clients, [picture] * clients
                ):
                    took[file] += times
        memory = {file: _memory(*address) for file, address in servers.items()}
    return {file: _seen(took[file], clients, memory[file]) for file in files}


def _seen(took: list[float], clients: int, memory: float) -> Latency:
    times = sorted(1000 * seconds for seconds in took)
    at = [times[min(len(times) - 1, int(share * len(times)))] for share in (0.5, 0.99)]
    return Latency(at[0], at[1], 1000 * clients * len(times) / sum(times), memory)


@contextmanager
def server(
    folder: Path, file: str, threads: int, slots: int
) -> Iterator[tuple[str, int]]:
    """Start a server, wait until it is ready, and yield its host and port."""
    argv = [
        sys.executable,
        "-m",
        "kd.cli",
        "serve",
        str(folder),
        "--file",
        file,
        "--port",
        "0",
        "--quiet",
        "--no-ui",
    ]
    argv += [
        "--threads",
        str(threads),
        "--slots",
        str(slots),
        "--no-self-check",
    ]  # refused graphs are measured too
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=terminate_with_parent(),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        host, _, port = (
            line.partition(" at http://")[2].partition(" ")[0].rpartition(":")
        )
        end = time.monotonic() + START_SECONDS
        while not host or _get(host, int(port), "/ping")[0] != 200:
            if not host or process.poll() is not None or time.monotonic() > end:
                process.terminate()
                reason = (
                    process.communicate()[1].strip().splitlines()
                    or ["it is never ready"]
                )[-1]
                raise _silent(f"does not start with '{file}' ({reason.rstrip('.')})")
            time.sleep(0.02)
        yield host, int(port)
    finally:
        process.terminate()
        process.communicate()


def turn(host: str, port: int, picture: bytes) -> list[float]:
    """Return the latencies of one client's turn, seconds, without the cold ones."""
    connection, took = (
        http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS),
        [],
    )
    headers = {"content-type": "image/jpeg"}
    begin = time.perf_counter()
    try:
        while len(took) < COLD + FEWEST or time.perf_counter() - begin < TURN:
            start = time.perf_counter()
            connection.request("POST", "/invocations", picture, headers)
            response = connection.getresponse()
            response.read()
            took.append(time.perf_counter() - start)
            if response.status != 200:
                raise _silent(f"responds with status {response.status}")
    except (OSError, http.client.HTTPException) as error:
        raise _silent(f"does not respond ({error})") from error
    finally:
        connection.close()
    return took[COLD:]


def _memory(host: str, port: int) -> float:
    lines = _get(host, port, "/metrics")[1].decode().splitlines()
    found = next(
        (
            line.split()[1]
            for line in lines
            if line.startswith("process_resident_memory_bytes ")
        ),
        "0",
    )
    return float(found) / 1e6


def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Return status and body; status 0: the port is closed."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def _silent(wrong: str) -> KdError:
    return KdError(
        "--compare",
        f"kd-serve {wrong}",
        "",
        "Start it by hand and see: kd-serve FOLDER --file FILE",
    )
