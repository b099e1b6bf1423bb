"""A job of one trainer and data hosts, with a real Ray cluster, once: the trainer runs
checks.py.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kd.cluster.hosts import RUN_MARK, LocalJob, marked_processes, signal_all

pytest.importorskip("ray")
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setenv("KD_DECODERS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)


def living(job: LocalJob) -> list[str]:
    """Return the commands of the processes of a job."""
    processes = []
    for pid in marked_processes(job.mark, RUN_MARK):
        with suppress(OSError):
            processes.append(
                Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
            )
    return processes


def on_host(host: str, job: LocalJob) -> set[int]:
    """Return the processes of a host of a job."""
    return set(marked_processes(host, "SM_CURRENT_HOST")) & set(
        marked_processes(job.mark, RUN_MARK)
    )


@pytest.mark.slow
def test_images_survive_failures_of_data_hosts():
    """With KD_SOAK=1 two data hosts, and whole runs."""
    script = [
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        str(HERE / "checks.py"),
    ]
    job = LocalJob({"dnn": 1, "data": 2 if os.environ.get("KD_SOAK") else 1}, script)
    try:
        assert job.wait() == 0
        assert {
            host: process.poll() for host, process in job.processes.items()
        } == dict.fromkeys(job.processes, 0)
        for _ in range(
            1200
        ):  # Ray's own helpers end when they notice that their node is gone
            if not living(job):
                break
            time.sleep(0.1)
        assert living(job) == []
    finally:
        job.close()


@pytest.mark.slow
def test_data_hosts_leave_when_the_trainers_host_dies():
    job = LocalJob(
        {"dnn": 1, "data": 1}, ["-m", "timeit", "-n1", "import time; time.sleep(60)"]
    )
    trainer, data = job.processes.values()
    try:
        for _ in range(
            300
        ):  # until it starts Ray, which it does when it has reached the trainer
            if on_host("127.0.0.3", job) - {data.pid}:
                break
            time.sleep(0.1)
        signal_all(on_host("127.0.0.2", job), signal.SIGKILL)
        assert trainer.wait(30) == -signal.SIGKILL
        assert data.wait(60) == 0
    finally:
        job.close()
    assert living(job) == []
