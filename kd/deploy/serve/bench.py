"""Measure the latency of clients: query a `kd-serve` per file of an export in turns.

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

TURN = 0.3  # least seconds of a server's turn
FEWEST = 8  # least number of responses in a turn
COLD = 3  # first responses that do not count: the caches hold another model
ENOUGH = 400  # responses of each server after which the time limit no longer matters
# seconds until a server must be ready; chosen: a slower server hangs
START_SECONDS = 120.0
# seconds until a response must arrive; chosen: far above any measured one
ANSWER_SECONDS = 60.0


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
    jpeg: bytes,
    threads: int,
    slots: int,
    seconds: float,
) -> dict[str, Latency]:
    """Send a JPEG repeatedly to one server per file, and return their latencies.

    Three turns, then more up to `seconds` per file. There are 2 x slots clients; one
    client if there is one slot.
    """
    clients = 1 if slots == 1 else 2 * slots
    latencies: dict[str, list[float]] = {file: [] for file in files}
    with ExitStack() as stack:
        servers = {
            file: stack.enter_context(server(folder, file, threads, slots))
            for file in files
        }
        pool = stack.enter_context(ThreadPoolExecutor(clients))
        end = time.monotonic() + seconds * len(servers)
        turns = 0
        while turns < 3 or (
            time.monotonic() < end and min(map(len, latencies.values())) < ENOUGH
        ):
            turns += 1
            for file, address in servers.items():
                jobs = [pool.submit(turn, *address, jpeg) for _ in range(clients)]
                for job in jobs:
                    latencies[file] += job.result()
        memory = {file: _memory_mb(*address) for file, address in servers.items()}
    return {file: _latency(latencies[file], clients, memory[file]) for file in files}


def _latency(seconds: list[float], clients: int, memory_mb: float) -> Latency:
    times = sorted(1000 * time for time in seconds)
    p50, p99 = (
        times[min(len(times) - 1, int(share * len(times)))] for share in (0.5, 0.99)
    )
    return Latency(p50, p99, 1000 * clients * len(times) / sum(times), memory_mb)


@contextmanager
def server(
    folder: Path, file: str, threads: int, slots: int
) -> Iterator[tuple[str, int]]:
    """Start a server, wait until it is ready, and yield its host and port."""
    # Without the self-check: refused graphs are measured too.
    options = f"--port 0 --quiet --no-ui --threads {threads} --slots {slots}"
    process = subprocess.Popen(
        [sys.executable, "-m", "kd.cli", "serve", str(folder), "--file", file,
         *options.split(), "--no-self-check"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=terminate_with_parent(),
    )  # fmt: skip
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
                _, stderr = process.communicate()
                lines = stderr.strip().splitlines() or ["it is never ready"]
                reason = lines[-1].rstrip(".")
                raise _server_error(f"does not start with '{file}' ({reason})")
            time.sleep(0.02)
        yield host, int(port)
    finally:
        process.terminate()
        process.communicate()


def turn(host: str, port: int, jpeg: bytes) -> list[float]:
    """Return the latencies of one client's turn, seconds, without the cold ones."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    seconds: list[float] = []
    headers = {"content-type": "image/jpeg"}
    begin = time.perf_counter()
    try:
        while len(seconds) < COLD + FEWEST or time.perf_counter() - begin < TURN:
            start = time.perf_counter()
            connection.request("POST", "/invocations", jpeg, headers)
            response = connection.getresponse()
            response.read()
            seconds.append(time.perf_counter() - start)
            if response.status != 200:
                raise _server_error(f"responds with status {response.status}")
    except (OSError, http.client.HTTPException) as error:
        raise _server_error(f"does not respond ({error})") from error
    finally:
        connection.close()
    return seconds[COLD:]


def _memory_mb(host: str, port: int) -> float:
    _, metrics = _get(host, port, "/metrics")
    for line in metrics.decode().splitlines():
        if line.startswith("process_resident_memory_bytes "):
            return float(line.split()[1]) / 1e6
    return 0.0


def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Return status and body; status 0 if the port is closed."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def _server_error(wrong: str) -> KdError:
    remedy = "Start it by hand and see: kd-serve FOLDER --file FILE"
    return KdError("--compare", f"kd-serve {wrong}", "", remedy)
