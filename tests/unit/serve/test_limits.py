"""Cores from affinity and cgroup, and the page for Prometheus."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kd.serve.limits import usable_cores
from kd.serve.metrics import BOUNDS, Metrics

ALL = len(os.sched_getaffinity(0))


def system(root: Path, group: str, files: dict[str, str]) -> Path:
    """Lay out /proc/self/cgroup and the controller's files below `root`."""
    for name, text in {"proc/self/cgroup": group, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", ALL), ("100000 100000", 1), ("150000 100000", 1), ("50000 100000", 1)]
)
def test_version_2(tmp_path, quota, cores):
    assert usable_cores(system(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": quota})) == cores


def test_a_wide_quota_leaves_the_affinity(tmp_path):
    assert usable_cores(system(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": "6400000 100000"})) == ALL


def test_the_quota_of_a_parent_counts(tmp_path):
    files = {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "100000 100000"}
    assert usable_cores(system(tmp_path, "0::/a/b\n", files)) == 1


@pytest.mark.parametrize(("quota", "cores"), [("-1", ALL), ("100000", 1)])
def test_version_1(tmp_path, quota, cores):
    files = {"sys/fs/cgroup/cpu/d/cpu.cfs_quota_us": quota, "sys/fs/cgroup/cpu/d/cpu.cfs_period_us": "100000"}
    assert usable_cores(system(tmp_path, "4:memory:/d\n3:cpu,cpuacct:/d\n", files)) == cores


def test_no_cgroup_at_all(tmp_path):
    assert usable_cores(tmp_path) == ALL


@pytest.mark.skipif(ALL < 2, reason="needs two cores")
def test_affinity():
    first, *_ = before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {first})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_the_text_for_prometheus():
    metrics = Metrics('a "name"\nof two lines', "v1")
    for seconds in (0.0005, 0.003, 0.003, 99.0):
        metrics.request("invocations", 200, seconds)
    metrics.request("invocations", 415, 0.2)
    text = metrics.text(True, 3, 4096)
    sample = re.compile(r'[a-z_]+(\{[a-z]+="(\\.|[^"\\])*"(,[a-z]+="(\\.|[^"\\])*")*\})? [0-9.e+-]+')
    for line in text.splitlines():
        assert line.startswith(("# HELP ", "# TYPE ")) or sample.fullmatch(line), line
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['kd_requests_total{route="invocations",status="200"}'] == "4"
    assert values["kd_in_flight"] == "3"
    buckets = [int(v) for k, v in values.items() if k.startswith("kd_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert len(buckets) == len(BOUNDS) + 1
    assert buckets[-1] == int(values['kd_seconds_count{stage="invocations total"}']) == 5
    assert int(values["process_resident_memory_bytes"]) > 1_000_000
