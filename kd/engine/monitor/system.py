"""Sample cores, memory, disk, network and GPUs of the machine in a thread."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from kd.core.host import cores
from kd.files.storage import append_rows, log

# seconds between two samples; one takes about a millisecond, which is a thousandth of
# one core
INTERVAL = 1.0
# samples between two searches for child processes, which list all processes of the
# system
CHILDREN_EVERY = 10
MIB = 2**20  # bytes


class Monitor:
    """Sample this machine in the background. Used as a context."""

    def __init__(self, path: Path, fresh: bool = True, interval: float = 0.0) -> None:
        """Prepare to append a sample to `path` every `interval` seconds."""
        # `fresh` removes an earlier file; an `interval` of 0 is `INTERVAL`.
        self.path = path
        self.interval = interval or INTERVAL
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="kd-monitor", daemon=True
        )
        if fresh:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join(5)

    def _run(self) -> None:
        """Sample until the end; an error is a warning and ends the sampling."""
        try:
            sampler = Sampler()
            while not self._over.wait(self.interval):
                append_rows(self.path, sampler.sample())
        except Exception as error:
            log.warning(
                f"monitor: it has stopped ({type(error).__name__}: {error}). Training"
                " goes on without it."
            )


class Sampler:
    """Sample this machine; rates follow from the totals of the previous sample."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        affinity = getattr(self._process, "cpu_affinity", None)
        self._cores = affinity() if affinity is not None else list(range(cores()))
        self._count = 0
        self._workers: list[psutil.Process] = []
        self._gpus = Gpus()
        self._time = time.monotonic()
        self._totals = counters()
        psutil.cpu_percent(percpu=True)  # the first call of each returns no valid value
        psutil.cpu_times_percent()
        self._process.cpu_percent()

    def sample(self) -> dict[str, Any]:
        """Return a row; rates and loads are means since the last one."""
        if self._count % CHILDREN_EVERY == 0:
            before = {worker.pid: worker for worker in self._workers}
            # psutil measures load since the last call on the same object
            self._workers = [
                before.get(child.pid, child) for child in self._process.children()
            ]
        self._count += 1
        now = time.monotonic()
        totals = counters()
        seconds = max(now - self._time, 1e-9)
        rates = [
            (new - old) / seconds / MIB
            for new, old in zip(totals, self._totals, strict=True)
        ]
        self._time = now
        self._totals = totals
        load = psutil.cpu_percent(percpu=True)
        memory = psutil.virtual_memory()
        return {
            "time": round(time.time(), 3),
            "cpu": [load[core] for core in self._cores if core < len(load)],
            "iowait": getattr(psutil.cpu_times_percent(), "iowait", 0.0),
            "memory_mib": round((memory.total - memory.available) / MIB, 1),
            "memory_total_mib": round(memory.total / MIB, 1),
            "process_mib": round(self._process.memory_info().rss / MIB, 1),
            "process_cpu": self._process.cpu_percent(),
            "workers": len(self._workers),
            "workers_cpu": round(sum(_load(worker) for worker in self._workers), 1),
            "disk_read_mib_s": round(rates[0], 3),
            "disk_write_mib_s": round(rates[1], 3),
            "network_mib_s": round(rates[2], 3),
            "gpu": self._gpus.sample(),
        }


def counters() -> tuple[float, float, float]:
    """Return the bytes since boot: read from disks, written to them, over networks."""
    disk = psutil.disk_io_counters()
    network = psutil.net_io_counters(pernic=True)
    moved = sum(
        card.bytes_sent + card.bytes_recv
        for name, card in network.items()
        if not name.startswith("lo")
    )
    if disk is None:
        return 0.0, 0.0, moved
    return disk.read_bytes, disk.write_bytes, moved


def _load(process: psutil.Process) -> float:
    try:
        return process.cpu_percent()
    except psutil.Error:  # it has ended
        return 0.0


class Gpus:
    """Read the NVIDIA GPUs of this machine, by nvidia-ml-py and a driver."""

    # Run on one H200 (results/speed/gpu_*.csv).

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: Sequence[Any] = ()
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._nvml = pynvml
                self._handles = [
                    pynvml.nvmlDeviceGetHandleByIndex(i)
                    for i in range(pynvml.nvmlDeviceGetCount())
                ]

    def sample(self) -> list[dict[str, float]]:
        """Return utilization (percent), memory (MiB) and power (watts) of each GPU."""
        return [gpu_sample(self._nvml, handle) for handle in self._handles]


def gpu_sample(nvml: Any, handle: Any) -> dict[str, float]:
    """Return one GPU's sample, as far as it reports the values."""
    row = {}
    with suppress(nvml.NVMLError):
        row["utilization"] = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    with suppress(nvml.NVMLError):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        row |= {
            "memory_mib": round(memory.used / MIB, 1),
            "memory_total_mib": round(memory.total / MIB, 1),
        }
    with suppress(nvml.NVMLError):  # a virtual GPU does not report it
        row["power_w"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    return row


def file_name(host: str, rank: int) -> str:
    """Return the name of a host's file of samples."""
    return f"monitor_{re.sub(r'[^A-Za-z0-9.-]', '-', host)}_{rank}.jsonl"
