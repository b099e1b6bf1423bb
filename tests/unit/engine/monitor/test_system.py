"""Samples of this machine against what the system says."""

import logging
import os
import threading
import time

import pytest
from pieces import wait_until

from kd.core.host import cores
from kd.engine.monitor.system import Monitor, Sampler, file_name
from kd.files.storage import read_rows


def test_a_sample_measures_the_machine():
    """Between the CPU time inside of the sample's interval and that around it, whatever the neighbours do."""
    outer, outer_cpu, before = time.perf_counter(), time.process_time(), time.time()
    sampler = Sampler()
    inner, inner_cpu = time.perf_counter(), time.process_time()
    held = b"x" * 2**26
    while time.process_time() < inner_cpu + 0.5:
        sum(range(1000))
    inner, inner_cpu = time.perf_counter() - inner, time.process_time() - inner_cpu
    row = sampler.sample()
    outer, outer_cpu = time.perf_counter() - outer, time.process_time() - outer_cpu
    assert len(row["cpu"]) == cores()
    assert all(0 <= load <= 100 for load in row["cpu"])
    ticks = 100 * 4 * 0.01 / inner  # of user and system time, at both ends
    assert 100 * inner_cpu / outer - ticks <= row["process_cpu"] <= 100 * outer_cpu / inner + ticks
    assert row["memory_total_mib"] == pytest.approx(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20, rel=0.01
    )
    assert len(held) / 2**20 < row["process_mib"] < row["memory_mib"] < row["memory_total_mib"]
    assert before - 0.001 <= row["time"] <= time.time() + 0.001
    assert min(row["disk_read_mib_s"], row["disk_write_mib_s"], row["network_mib_s"]) >= 0


def test_samples_are_taken_in_the_background(tmp_path):
    path, before = tmp_path / file_name("my host", 3), threading.active_count()
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
        monkeypatch.setattr(Sampler, "_counters", staticmethod(lambda: 1 / 0))
    with caplog.at_level(logging.WARNING, "kd"), Monitor(tmp_path / "nowhere" / "m", interval=0.01):
        wait_until(lambda: "kd-monitor" not in [thread.name for thread in threading.enumerate()])
    assert [record.message.split(":")[0] for record in caplog.records] == ["monitor"]
