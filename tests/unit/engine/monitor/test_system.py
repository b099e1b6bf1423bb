"""Samples of this machine against what the system says."""

import logging
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from pieces import wait_until

from kd.core.host import cores
from kd.engine.monitor import system
from kd.engine.monitor.system import (
    CHILDREN_EVERY,
    Monitor,
    Sampler,
    file_name,
    gpu_sample,
)
from kd.files.storage import read_rows


def test_a_sample_measures_the_machine():
    """Between the CPU time inside of the sample's interval and that around it, whatever
    the neighbours do.
    """
    outer = time.perf_counter()
    outer_cpu = time.process_time()
    before = time.time()
    sampler = Sampler()
    inner = time.perf_counter()
    inner_cpu = time.process_time()
    buffer = b"x" * 2**26
    while time.process_time() < inner_cpu + 0.5:
        sum(range(1000))
    inner = time.perf_counter() - inner
    inner_cpu = time.process_time() - inner_cpu
    row = sampler.sample()
    outer = time.perf_counter() - outer
    outer_cpu = time.process_time() - outer_cpu
    assert len(row["cpu"]) == cores()
    assert all(0 <= load <= 100 for load in row["cpu"])
    ticks = 100 * 4 * 0.01 / inner  # of user and system time, at both ends
    assert (
        100 * inner_cpu / outer - ticks
        <= row["process_cpu"]
        <= 100 * outer_cpu / inner + ticks
    )
    assert row["memory_total_mib"] == pytest.approx(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20, rel=0.01
    )
    assert (
        len(buffer) / 2**20
        < row["process_mib"]
        < row["memory_mib"]
        < row["memory_total_mib"]
    )
    assert before - 0.001 <= row["time"] <= time.time() + 0.001
    # to the millisecond
    assert any(sampled["time"] % 1 for sampled in (row, sampler.sample()))
    assert (
        min(row["disk_read_mib_s"], row["disk_write_mib_s"], row["network_mib_s"]) >= 0
    )


def test_the_load_of_workers_is_that_since_the_last_sample():
    """Also after the children were looked for again."""
    sampler = Sampler()
    busy = [sys.executable, "-c", "while True: pass"]
    children = len(psutil.Process().children())  # of the tests before
    with subprocess.Popen(busy) as worker:
        try:
            assert sampler.sample()["workers"] == children + 1
            for _ in range(2 * CHILDREN_EVERY):
                time.sleep(0.05)
                row = sampler.sample()
                assert row["workers"] == children + 1
                workers_cpu = (
                    row["workers_cpu"] if sampler._count % CHILDREN_EVERY == 1 else 1
                )
                assert workers_cpu > 0
        finally:
            worker.kill()


def test_the_cores_are_those_that_the_process_may_use():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        assert Sampler()._cores == [max(allowed)]
        assert len(Sampler().sample()["cpu"]) == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_what_the_driver_says_of_a_gpu_in_units_of_a_row():
    """nvidia-ml-py gives bytes and milliwatts."""
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=45),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(
            used=3 * 2**30, total=80 * 2**30
        ),
        nvmlDeviceGetPowerUsage=lambda _: 250_500,
    )
    expected = {
        "utilization": 45.0,
        "memory_mib": 3072.0,
        "memory_total_mib": 81_920.0,
        "power_w": 250.5,
    }
    assert gpu_sample(nvml, 0) == expected

    def fails(_: int) -> int:
        raise nvml.NVMLError

    nvml.nvmlDeviceGetPowerUsage = fails  # a virtual one
    assert gpu_sample(nvml, 0) == {
        name: value for name, value in expected.items() if name != "power_w"
    }


def test_samples_are_taken_in_the_background(tmp_path):
    path = tmp_path / file_name("my host", 3)
    before = threading.active_count()
    assert path.name == "monitor_my-host_3.jsonl"
    path.write_text("{}\n")
    for fresh in (True, False):
        with Monitor(path, fresh, interval=0.02):
            start = len(read_rows(path))
            wait_until(lambda start=start: len(read_rows(path)) >= start + 3)
        assert threading.active_count() == before
        assert (start > 0) == (not fresh)
    rows = read_rows(path)
    assert {} not in rows
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    with Monitor(path, fresh=True):
        pass
    assert not path.exists()


@pytest.mark.parametrize("at", ["a sample", "its start"])
def test_a_monitor_that_fails_says_so_once(at, tmp_path, caplog, monkeypatch):
    if at == "its start":  # a container may hide /proc/diskstats
        monkeypatch.setattr(system, "counters", lambda: 1 / 0)
    with (
        caplog.at_level(logging.WARNING, "kd"),
        Monitor(tmp_path / "nowhere" / "m", interval=0.01),
    ):
        wait_until(
            lambda: (
                "kd-monitor" not in [thread.name for thread in threading.enumerate()]
            )
        )
    assert [record.message.split(":")[0] for record in caplog.records] == ["monitor"]
