"""Read facts of this machine and process, and handle its signals."""

import ctypes
import importlib.util
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

from kd.core.errors import Interrupted
from kd.core.references import redact

# files of limit and use, and file and line that count reclaimable page cache: cgroup
# v2, v1
CONTAINERS = (
    ("/sys/fs/cgroup/memory.max", "memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
# malloc.h's limit of free bytes at the heap's top (default 2**17)
_M_TRIM_THRESHOLD = -1
# malloc.h's limit of mapped blocks (default 2**16)
_M_MMAP_MAX = -4
HANDLED = (signal.SIGTERM, signal.SIGINT)
# seconds within which two signals count as one: a launcher forwards what its group
# received
TOGETHER = 1.0
# of prctl(2): the signal that a process gets when its parent ends
_PR_SET_PDEATHSIG = 1

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Linux's names for units that multiply bfloat16: two of x86, one of ARM. A ViT-B's
forward of 16 images took 0.97 s with the first on two cores of an AMD EPYC, and 3.6 s
in float32 on one without (`results/speed/mfu_*.csv`).
"""
MOST_CONVOLVED = 0.2
"""Share of multiplications in convolutions up to which AVX-512 gains by bfloat16. A
step took on two threads, float32 = 1: XCiT of vit_food (share 0.40) 3.8, ResNet-18
(1.0) 2.6, ConvNeXt 1.2.
"""
MOST_DEPTHWISE = {True: 0.03, False: 0.1}
"""The same in depthwise convolutions, with a backward and without. A step took on one
thread by that share: 0 0.61, 0.01 0.87 and 1.06, 0.055 1.07, 0.09 1.34, 0.13 1.92. A
forward: 0.09 0.68, 0.13 1.12.
"""


def bf16_units(root: Path = Path("/")) -> set[str]:
    """Return this processor's bfloat16 units; empty if the system reports none.

    `root` holds /proc.
    """
    with suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return BF16_FLAGS & set(flags.split())
    return set()


def peak_mib() -> float:
    """Return the largest resident memory of this process so far, MiB."""
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset / 2**20
    import resource  # not on Windows

    units_per_mib = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units_per_mib


def open_files(number: int) -> int:
    """Raise the limit of open files towards `number`; return how many are allowed."""
    if sys.platform == "win32":
        return number
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children, running or ended."""
    import psutil  # 10 ms of imports

    total = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            total += sum(child.cpu_times()[:2])
    return total


def bf16_pays(
    convolved: float,
    depthwise: float,
    trained: bool,
    threads: int,
    root: Path = Path("/"),
) -> bool:
    """Return whether bfloat16 is faster than float32 on this processor.

    The processor has bf16 units.

    `convolved`: share of its multiplications in convolutions; `depthwise`: in depthwise
    convolutions; `trained`: its backward runs too. For processors with bfloat16 in
    AVX-512 only, see `results/speed/precision_*.csv`; others were not measured.
    """
    if bf16_units(root) != {"avx512_bf16"}:
        return True
    if trained and threads > 1 and convolved > MOST_CONVOLVED:
        return False
    return depthwise <= MOST_DEPTHWISE[trained]


def cores(root: Path = Path("/")) -> int:
    """Return the number of cores that affinity and cgroups allow this process.

    `root` holds /proc and /sys.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, min([allowed, *map(int, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas, in cores, of this process's cgroup and its parents.

    In v1 the period has its own file.
    """
    for controller, mount, file in (
        ("", "sys/fs/cgroup", "cpu.max"),
        ("cpu", "sys/fs/cgroup/cpu", "cpu.cfs_quota_us"),
    ):
        top = root / mount
        group = "/"
        with suppress(OSError, ValueError):
            for line in (root / "proc/self/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if controller in controllers.split(","):
                    group = path
        folder = top / group.lstrip("/")
        for level in (folder, *folder.parents):
            if level != folder and not level.is_relative_to(top):
                break
            with suppress(OSError, ValueError, ZeroDivisionError):
                quota, *periods = (level / file).read_text().split()
                if quota not in ("max", "-1"):
                    if not periods:
                        periods = [(level / "cpu.cfs_period_us").read_text()]
                    yield int(quota) / int(periods[0])


def process_stat(pid: int | str = "self") -> list[str]:
    """Return the fields of a process from its state on (`man 5 proc`).

    They are empty if the system does not report them.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def command_seconds() -> float:
    """Return the age of this command in seconds; 0.0: unknown.

    The command is this process, or the torchrun that started it.
    """
    stat = process_stat()
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and stat:
        stat = process_stat(stat[1]) or stat  # field 4 is the parent
    if not stat or not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    start_seconds = int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_seconds


class BusyClock:
    """This clock counts seconds in which a thread computed or waited for a core.

    In the rest of its time it waited for bytes.

    On a shared machine a decoding thread may get a core for a fraction of its time. Its
    CPU time alone would look like waiting for the disk. Only Linux also counts the time
    in a core's queue.
    """

    def __init__(self) -> None:
        self._begin = self._now()

    def __call__(self) -> float:
        """Return the seconds since its creation; a call takes 10 microseconds.

        Only the creating thread may call it.
        """
        return self._now() - self._begin

    @staticmethod
    def _now() -> float:
        try:
            with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
                queued = int(file.read(64).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            queued = 0.0
        return time.thread_time() + queued


def keep_freed_memory() -> bool:
    """Keep freed memory in this process from now on; return whether that was set.

    glibc returns large blocks to the system and requests them again at each step. The
    first write to each page of 4 KiB is then a fault: 380,000 in one forward of ViT-B
    (`benchmarks/page_faults.py`). Nothing changes with other C libraries, or if the
    user has set glibc's own variables (MALLOC_..., GLIBC_TUNABLES).
    """
    set_by_user = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )
    if set_by_user or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return all([libc.mallopt(_M_MMAP_MAX, 0), libc.mallopt(_M_TRIM_THRESHOLD, -1)])


class _Stack(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("size", ctypes.c_size_t),
    )


@contextmanager
def signal_stack() -> Iterator[None]:
    """Restore this thread's signal stack after calls of OpenVINO.

    Each Core of OpenVINO sets its own signal stack with its first model. When it is
    destroyed it restores the previous one, even if that was freed. Python's handlers
    run there: the next signal, such as SIGTERM, was then a segmentation fault.
    """
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    before = _Stack()
    libc.sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        libc.sigaltstack(ctypes.byref(before), None)


def terminate_with_parent() -> Callable[[], None] | None:
    """Return a `preexec_fn` by which a child gets SIGTERM when this process ends.

    It also works where this process is killed. Only Linux has it; None elsewhere.
    """
    parent = os.getpid()

    def request_signal() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended already
            os._exit(Interrupted.exit_code)

    return request_signal if sys.platform == "linux" else None


def free_mib() -> float:
    """Return the MiB that processes may still allocate, here and in the container."""
    import psutil

    free_bytes = [float(psutil.virtual_memory().available)]
    for limit_file, usage_file, reclaimable in CONTAINERS:
        folder = Path(limit_file).parent
        limit = _read_number(limit_file)
        if limit is not None:
            usage = _read_number(folder / usage_file) or 0.0
            cache = _read_number(folder / "memory.stat", reclaimable) or 0.0
            free_bytes.append(limit - usage + cache)
    return max(0.0, min(free_bytes) / 2**20)


def _read_number(path: Path | str, name: str = "") -> float | None:
    """Return a number in a file, the first or the one after `name` at a line's start.

    None: it is `max`, or missing.
    """
    try:
        lines = [
            line.split() for line in Path(path).read_text(encoding="ascii").splitlines()
        ]
        value = float(
            next(words[-1] for words in lines if not name or words[0] == name)
        )
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    return value if math.isfinite(value) else None


def shared_memory_mib() -> float:
    """Return the free MiB of shared memory; infinity: there is no such folder."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return math.inf
    return status.f_bavail * status.f_frsize / 2**20


def environment() -> dict[str, Any]:
    """Return versions, machine and command of this process.

    Values of referenced variables are hidden: `kd.core.references.redact`.
    """
    return {
        "packages": package_versions(
            "kd",
            "torch",
            "timm",
            "torchvision",
            "pillow",
            "numpy",
            "safetensors",
            "omegaconf",
        ),
        "python": platform.python_version(),
        "machine": {
            "system": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
        },
        "command": redact(" ".join(sys.argv)),
    }


def installed(package: str) -> bool:
    """Return whether a package can be found, without importing it.

    NNCF reads its telemetry setting at import.
    """
    return importlib.util.find_spec(package) is not None


def package_versions(*names: str) -> dict[str, str]:
    """Return the versions of installed packages."""
    found_versions = {}
    for name in names:
        try:
            found_versions[name] = version(name)
        except PackageNotFoundError:
            found_versions[name] = "not installed"
    return found_versions


def processor() -> str:
    """Return the processor's name from the system."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


class Signals:
    """This object handles SIGTERM and SIGINT while a command runs.

    Training writes a checkpoint after its step; anything else ends at once. In Python,
    without a command, Ctrl-C stays a KeyboardInterrupt and SIGTERM ends the process.
    """

    _process = 0  # the process whose signals are handled
    _training = False
    _name = ""  # the received signal
    _received = 0.0  # when, seconds

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals in this block, then restore the previous handlers.

        Only the main thread handles signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._process = os.getpid()
        self._training = False
        self._name = ""
        before = [signal.signal(number, self._receive) for number in HANDLED]
        try:
            yield
        finally:
            for number, handler in zip(HANDLED, before, strict=True):
                signal.signal(number, handler)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Record signals for `requested` in this block instead of ending at once."""
        self._training = True
        try:
            yield
        finally:
            self._training = False
        if self._name:
            raise Interrupted(self._message())

    def requested(self) -> bool:
        return bool(self._name)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # this is a data worker in the same group: it serves until its trainer ends
        if os.getpid() != self._process:
            return
        if self._name and time.monotonic() - self._received < TOGETHER:
            return
        if self._name:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._name = signal.Signals(number).name
        self._received = time.monotonic()
        if not self._training:
            raise Interrupted(self._message())
        # not print: the signal may have interrupted a print
        os.write(
            2,
            f"{self._name}: finishing the step and writing a checkpoint; a second"
            " signal ends now\n".encode(),
        )

    def _message(self) -> str:
        return f"stopped by {self._name}; the same command resumes"


signals = Signals()  # one per process: it has only one set of handlers
