"""A job of one trainer and two data hosts, with a real Ray cluster, once: the trainer runs checks.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kd.sagemaker.hosts import marked
from kd.sagemaker.local import RUN_MARK, LocalJob

pytest.importorskip("ray")
HERE = Path(__file__).parent


def test_images_of_data_hosts_whatever_happens_to_them(monkeypatch):
    monkeypatch.setenv("KD_DECODERS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    script = ["-m", "pytest", "-q", "-x", "-s", "--durations=0", "-p", "no:cacheprovider", str(HERE / "checks.py")]
    job = LocalJob({"dnn": 1, "data": 2}, script)
    try:
        assert job.wait() == 0
        assert {host: process.poll() for host, process in job.processes.items()} == dict.fromkeys(job.processes, 0)
        assert list(marked(job.mark, RUN_MARK)) == []
    finally:
        job.close()
