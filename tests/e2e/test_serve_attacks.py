"""A real kd-serve process under attack: health checks are answered, memory is bounded,
and nothing is a 500.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import attacker
import pytest
from pieces import wait_until
from PIL import Image
from serving import Running, images

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(exported):
    with Running(exported, "--quiet") as running:
        yield running
        assert running.stop() == 0, running.errors
    assert "Traceback" not in running.errors
    assert " bug: " not in running.errors


def cpu_seconds(server: Running) -> float:
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ping(server: Running) -> tuple[float, int | str]:
    """Return what a health check on a new connection took, and its status or what went
    wrong.

    It took as long as the server computed meanwhile, if that is less: on a busy machine
    it waits for its turn too.
    """
    start = time.monotonic()
    before = cpu_seconds(server)
    connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
    try:
        connection.request("GET", "/ping")
        outcome: int | str = connection.getresponse().status
    except OSError as error:
        outcome = type(error).__name__
    finally:
        connection.close()
    return min(time.monotonic() - start, cpu_seconds(server) - before), outcome


@pytest.mark.parametrize("kind", attacker.ATTACKS)
def test_health_checks_under_attack(server, kind):
    process = subprocess.Popen(
        [sys.executable, attacker.__file__, kind, str(server.port)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "attacking\n"
        end = time.monotonic() + 1.5
        pings = []
        while time.monotonic() < end:
            pings.append(ping(server))
            time.sleep(0.02)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    assert {status for _, status in pings} == {200}
    slowest = sorted(seconds for seconds, _ in pings)[-2:]
    assert slowest[0] < 1, (
        "more than one health check was slow; one may be the machine's own stall"
    )
    wait_until(
        lambda: server.post(b"x").status == 415
    )  # the service itself comes back when the attackers are gone


@pytest.mark.parametrize(
    "data",
    [
        ["x" * 2900, *[""] * 250_000],
        ["x" * 1000] * 1000,
        [[]] * 340_000,
        [{}] * 340_000,
        [[[[0]]]] * 120_000,
    ],
    ids=["one long string", "strings", "lists", "dicts", "nested"],
)
def test_a_body_of_1_mb_takes_no_gigabytes(server, data):
    before = server.memory_mb("VmHWM")
    reply = server.post(json.dumps({"images": data}).encode(), "application/json")
    assert reply.status in (400, 413)
    assert server.memory_mb("VmHWM") < before + 60


def png(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("1", (side, side)).save(file, "PNG")
    return file.getvalue()


def test_the_pixels_of_a_request_are_counted_together(server):
    reply = server.post(images(*[png(4900)] * 3), "application/json")
    assert reply.status == 413
    assert reply.json["detail"].endswith(
        "2 of the largest that are allowed: 25 million, a JPEG 64."
    )
    assert server.post(images(*[png(100)] * 16), "application/json").status == 200


@pytest.mark.parametrize(
    ("options", "max_mb"), [({}, 60), ({"progressive": True, "subsampling": 0}, 400)]
)
def test_a_photograph_of_48_million_pixels_stays_within_the_memory_of_25(
    exported, options, max_mb
):
    """8000 x 6000, the second mode of most phones. Before, 413. What 25 million pixels
    may take: 400 MB.
    """
    file = io.BytesIO()
    Image.new("RGB", (8000, 6000), "teal").save(file, "JPEG", **options)
    with Running(exported, "--slots", "1") as server:
        before = server.memory_mb()
        assert server.post(file.getvalue()).status == 200
        used_mb = (server.memory_mb("VmHWM") - before) * 2**20 / 1e6
    print(f"{used_mb:.0f} MB more, {options}")
    assert used_mb < max_mb


def test_too_little_memory_is_a_503(exported):
    """An image of 24 million pixels needs 72 MB; the process may take 20 MB more than
    it has.
    """
    file = io.BytesIO()
    Image.new("RGB", (4900, 4900)).save(file, "PNG")
    with Running(exported, "--slots", "1") as server:
        assert server.post(png(100)).status == 200
        allowed = int((server.memory_mb("VmSize") + 20) * 2**20)
        resource.prlimit(
            server.pid, resource.RLIMIT_AS, (allowed, resource.RLIM_INFINITY)
        )
        reply = server.post(file.getvalue())
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert "memory" in reply.json["detail"]
        assert server.post(png(100)).status == 200
    assert " bug: " not in server.errors


def test_a_client_that_hangs_up_is_no_bug(exported):
    """In the middle of its body, and while its image is decoded."""
    head = (
        b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-type:"
        b" image/png\r\ncontent-length: %d\r\n\r\n"
    )
    large = png(4900)
    with Running(exported) as server:
        for sent in (head % 100 + b"12345", head % len(large) + large):
            with socket.create_connection(
                (server.host, server.port), timeout=10
            ) as connection:
                connection.sendall(sent)
        counted = 'kd_requests_total{route="invocations",status="400"} 2'
        wait_until(lambda: counted in server.get("/metrics").body.decode())
    assert "Traceback" not in server.errors
