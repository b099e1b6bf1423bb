"""What the machine has left, read from files as the kernel writes them."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kd.core import host

GIB = 2**30
ALL = len(os.sched_getaffinity(0))


def system(root: Path, group: str, files: dict[str, str]) -> Path:
    """Lay out /proc/self/cgroup and the controller's files below `root`."""
    for name, text in {"proc/self/cgroup": group, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "4:memory:/d\n3:cpu,cpuacct:/d\n", "cpu/d/cpu.cfs_quota_us"


@pytest.mark.parametrize(
    ("group", "file", "quota", "cores"),
    [
        ("0::/\n", "cpu.max", "max 100000", ALL),
        ("0::/\n", "cpu.max", "100000 100000", 1),
        ("0::/\n", "cpu.max", "150000 100000", 1),
        ("0::/\n", "cpu.max", "50000 100000", 1),
        (
            "0::/\n",
            "cpu.max",
            "6400000 100000",
            ALL,
        ),  # a wide quota leaves the affinity
        ("0::/a/b\n", "a/cpu.max", "100000 100000", 1),  # that of a parent counts
        (*V1, "-1", ALL),
        (*V1, "100000", 1),
    ],
)
def test_quotas_of_both_versions_limit_the_cores(tmp_path, group, file, quota, cores):
    defaults = {"a/b/cpu.max": "max 100000", "cpu/d/cpu.cfs_period_us": "100000"}
    files = {
        f"sys/fs/cgroup/{name}": text
        for name, text in {**defaults, file: quota}.items()
    }
    assert host.cores(system(tmp_path, group, files)) == cores


def test_without_a_cgroup_every_core_counts(tmp_path):
    assert host.cores(tmp_path) == ALL


@pytest.mark.skipif(ALL < 2, reason="needs two cores")
def test_the_cores_are_those_of_the_affinity():
    first, *_ = before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {first})
    try:
        assert host.cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def container(folder, version: int, limit: str, usage: int, droppable: int) -> None:
    """Write what a cgroup of that version says of its memory."""
    limits, uses, name = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    (folder / limits).write_text(f"{limit}\n")
    (folder / uses).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(
        f"anon {usage - droppable}\nslab_reclaimable 7\n{name} {droppable}\n"
    )


@pytest.fixture
def inside(monkeypatch, tmp_path):
    """Be in a container whose files lie in tmp_path."""
    files = tuple(
        (str(tmp_path / limit.rsplit("/", 1)[1]), *names)
        for limit, *names in host.CONTAINERS
    )
    monkeypatch.setattr(host, "CONTAINERS", files)
    return tmp_path


@pytest.mark.parametrize("version", [1, 2])
def test_pages_of_files_that_can_be_dropped_are_free(inside, version):
    container(inside, version, str(3 * GIB // 64), 2 * GIB // 64, GIB // 64)
    # of 3 parts 2 are used, and 1 of these can be dropped
    assert host.free_mib() == 2 * 1024 / 64


@pytest.mark.parametrize(("version", "limit"), [(1, str(2**63 - 4096)), (2, "max")])
def test_without_a_limit_it_is_the_machine_s_own(inside, version, limit):
    container(inside, version, limit, GIB, 0)
    assert host.free_mib() == pytest.approx(
        psutil.virtual_memory().available / 2**20, rel=0.05
    )


def test_a_container_that_is_over_its_limit_has_nothing_left(inside):
    container(inside, 2, str(GIB), 2 * GIB, 0)
    assert host.free_mib() == 0.0


def test_a_container_that_does_not_count_what_can_be_dropped(inside):
    container(inside, 2, str(3 * GIB // 64), 2 * GIB // 64, GIB // 64)
    (inside / "memory.stat").write_text("anon 7\ninactive_file\n")
    assert host.free_mib() == 1024 / 64
    (inside / "memory.stat").unlink()
    assert host.free_mib() == 1024 / 64


WINDOWS = """
import os, pathlib, psutil, sys
sys.modules["fcntl"] = sys.modules["resource"] = None
for name in ("sysconf", "sched_getaffinity", "statvfs", "fork"):
    delattr(os, name)
import kd.cli.__main__, kd.deploy.predict.predict, kd.deploy.serve.server
from kd.core import host
from kd.core.errors import RunError
from kd.files.storage import lock
assert host.cores() == os.cpu_count() and host.free_mib() >= 0
try:
    lock(pathlib.Path(sys.argv[1]), "run")
except RunError as error:
    print(error)
"""


def test_modules_missing_on_windows_fail_only_on_use(tmp_path):
    """Windows itself was not at hand: these are the modules and functions that it has
    not.
    """
    completed = subprocess.run(
        [sys.executable, "-c", WINDOWS, tmp_path / "a"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (completed.returncode, completed.stderr) == (0, "")
    assert "without locks (on Windows kd trains in WSL)" in completed.stdout


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells when a process began"
)
def test_a_command_has_run_since_its_process_began_or_the_torchrun_that_started_it():
    ask = (
        "import time; begin = time.perf_counter(); from kd.core.host import"
        " command_seconds; "
    )
    ask += "print(command_seconds(), time.perf_counter() - begin)"

    def answer(**variables: str) -> list[float]:
        completed = subprocess.run(
            [sys.executable, "-c", ask],
            env={**os.environ, **variables},
            capture_output=True,
        )
        return [float(word) for word in completed.stdout.split()]

    begin = time.perf_counter()
    seconds, imports = answer()
    # the kernel counts in hundredths
    assert imports - 0.02 <= seconds <= time.perf_counter() - begin + 0.02
    assert (
        answer(TORCHELASTIC_RESTART_COUNT="1")[0] <= time.perf_counter() - begin + 0.02
    )
    process_age = time.time() - psutil.Process().create_time()
    assert answer(TORCHELASTIC_RESTART_COUNT="0")[0] == pytest.approx(
        process_age, abs=10.0
    )


FAULTS = """
import resource, torch
from kd.parts.backends.cpu import CPU
CPU("fp32", 5.0, threads=1)
for turn in range(14):
    if turn == 4:  # the first turns touch the pages for the first time
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(12 * 2**18) for _ in range(4)]  # 12 MiB each
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**variables: str) -> int:
    environ = {
        name: value for name, value in os.environ.items() if name[:7] != "MALLOC_"
    } | variables
    completed = subprocess.run(
        [sys.executable, "-c", FAULTS], env=environ, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    return int(completed.stdout)


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
@pytest.mark.skipif(
    HUGE.exists() and "[always]" in HUGE.read_text(),
    reason="pages of 2 MiB for every process",
)
def test_a_run_on_a_cpu_does_not_touch_freed_pages_anew():
    pages = 10 * 4 * 12 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    assert faults() < pages / 20
    # the user's choice stands
    assert faults(MALLOC_MMAP_THRESHOLD_="131072") > pages / 2


BURN = (
    "import time; b = time.process_time()\nwhile time.process_time() < b + 0.3:"
    " pass\nprint(flush=True); input()"
)


def test_the_cpu_time_of_a_process_is_that_of_its_children_too_while_they_run_and_after():
    before = host.cpu_seconds()
    child = subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    running = host.cpu_seconds()
    assert 0.28 <= running - before < 2
    child.communicate(b"\n")
    # clocks of the system tick a hundred times a second
    assert host.cpu_seconds() >= running - 0.02
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert host.cpu_seconds() - running >= 0.17


@pytest.mark.parametrize(
    ("requested", "hard", "allowed", "soft"),
    [(300, 200, 200, 200), (150, 200, 150, 150), (50, 200, 50, 100)],
)
def test_open_files_are_raised_to_what_the_system_allows(
    requested, hard, allowed, soft
):
    """A process of its own: a limit that was lowered cannot be raised again."""
    code = """
import resource, sys
from kd.core.host import open_files
wanted, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
print(open_files(wanted), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    argv = [sys.executable, "-c", code, str(requested), str(hard)]
    output = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert output.split() == [str(allowed), str(soft)]
