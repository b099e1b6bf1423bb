"""What `data.loader: ray` costs and wins against the local loader: one trainer and two
data hosts on this machine.

Run: python benchmarks/remote.py --data FOLDER [--images 384] [--rounds 3] [--size 224]

- `cost`: CPU milliseconds and bytes of an image, local (2 workers) and Ray (3 decoders)
  in turns, all processes.
- `bound`: an image also takes 20 ms of waiting, which stands for the work of a core
  that this machine does not have. The step takes 1 ms an image. Local: 1 worker. Ray: 3
  decoders, one on each host.
- `killed`, `frozen`: the longest wait for a batch while that happens to a data host
  (`data.deadline` 3 s).

All hosts share the cores of one machine, and the network is the loopback. So `cost` is
real CPU time, without a network card's share; `bound` shows that waiting is divided
among hosts, not that other machines' cores are.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from _record import write
from kd.cluster.decoders import Pool
from kd.cluster.hosts import LocalJob, marked_processes, signal_all
from kd.cluster.remote import RemoteLoader
from kd.core.types import TENSORS, Batch, Plan, Sample
from kd.data.loader import LocalLoader, Share
from kd.data.views import TrainTransform, Views
from kd.parts.datasets.imagefolder import Options, build

BATCH = 32
WAITED = 0.020
STEP = 0.001
TICKS = os.sysconf("SC_CLK_TCK")


class Waiting:
    """Views that take longer, without a core."""

    def __init__(self, views: Views) -> None:
        self.views = views
        self.classes = views.classes

    def __len__(self) -> int:
        return len(self.views)

    def load(self, id: int, view: int) -> Sample:
        """Return a view after a while."""
        time.sleep(WAITED)
        return self.views.load(id, view)


def cpu(pids: set[int]) -> dict[int, float]:
    """Return the CPU seconds of processes so far."""
    seconds = {}
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        seconds[pid] = (int(words[11]) + int(words[12])) / TICKS
    return seconds


def of_job() -> set[int]:
    """Return all processes of this job, this one too."""
    return {os.getpid(), *marked_processes(os.environ["KD_RUN"], "KD_RUN")}


def of_ray(host: str | None = None) -> set[int]:
    """Return Ray's processes, of one host or of all."""
    pids = {
        pid
        for pid in of_job()
        if b"\0KD_RAY=" in Path(f"/proc/{pid}/environ").read_bytes()
    }
    return (
        pids if host is None else pids & set(marked_processes(host, "SM_CURRENT_HOST"))
    )


def plan(images: int, seed: int) -> Plan:
    """Return a shuffled epoch."""
    ids = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    return Plan(ids=ids, weights=torch.ones(images))


def epoch(batches: Iterator[Batch], step: float = 0.0) -> tuple[float, float]:
    """Return the seconds of an epoch and of the longest wait for a batch."""
    start = before = time.perf_counter()
    longest = 0.0
    for batch in batches:
        longest = max(longest, time.perf_counter() - before)
        time.sleep(step * len(batch.ids))
        before = time.perf_counter()
    return time.perf_counter() - start, longest


def inside(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure in the trainer of the job."""
    source = build(Options(root=options.data), "train", None)
    views = Views(source, TrainTransform(options.size, 0.35, 0.5, 0.3), options.size, 0)
    datasets = [views, Waiting(views)]
    pool = Pool(datasets, 0, 1, 3.0)
    while len(pool.trusted()) < 3:
        time.sleep(0.5)
    remote = [
        RemoteLoader(pool, number, each, Share(BATCH, 1, 0, 1))
        for number, each in enumerate(datasets)
    ]
    local = [
        LocalLoader(views, Share(BATCH, 1, 0, 1), 2),
        LocalLoader(datasets[1], Share(BATCH, 1, 0, 1), 1),
    ]
    rows = []
    for turn in range(
        options.rounds + 1
    ):  # round 0 warms up: files in memory, workers forked
        for kind in ("local", "ray") if turn % 2 else ("ray", "local"):
            loader = local[0] if kind == "local" else remote[0]
            ray = of_ray()
            before = cpu(of_job())
            seconds, _ = epoch(loader.epoch(plan(options.images, turn), turn))
            cpu_seconds = {
                pid: value - before.get(pid, 0.0)
                for pid, value in cpu(of_job()).items()
            }
            spent = sum(
                value
                for pid, value in cpu_seconds.items()
                if kind == "ray" or pid not in ray
            )
            row = {
                "part": "cost",
                "round": turn,
                "loader": kind,
                "images_per_second": options.images / seconds,
            }
            row |= {
                "cpu_ms": 1000 * spent / options.images,
                "trainer_cpu_ms": 1000 * cpu_seconds[os.getpid()] / options.images,
            }
            rows.append(row)
    for turn in range(1, options.rounds + 1):
        for kind, loader in (("local", local[1]), ("ray", remote[1])):
            seconds, _ = epoch(loader.epoch(plan(options.images, turn), turn), STEP)
            row = {"part": "bound", "round": turn, "loader": kind}
            rows.append(row | {"images_per_second": options.images / seconds})
    for event, host, number in (
        ("killed", "127.0.0.3", signal.SIGKILL),
        ("frozen", "127.0.0.4", signal.SIGSTOP),
    ):
        batches = remote[1].epoch(plan(options.images, 9), 9)
        next(batches)
        stopped = of_ray(host)
        signal_all(sorted(stopped), number)
        seconds, longest = epoch(batches)
        signal_all(sorted(stopped), signal.SIGCONT)
        rows.append(
            {"part": event, "round": 1, "loader": "ray", "longest_wait_s": longest}
        )
    payload = sum(
        getattr(batch, name).nbytes
        for batch in [next(local[0].epoch(plan(BATCH, 0), 0))]
        for name in TENSORS
    )
    return [
        {"bytes_per_image": payload // BATCH if row["part"] == "cost" else "", **row}
        for row in rows
    ]


NAMES = (
    "part",
    "round",
    "loader",
    "images_per_second",
    "cpu_ms",
    "trainer_cpu_ms",
    "bytes_per_image",
    "longest_wait_s",
)


def main() -> int:
    """Start the job, or measure in it; write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", required=True, help="folder with train/<class>/* and val/<class>/*"
    )
    parser.add_argument("--images", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rows", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows:
        Path(options.rows).write_text(json.dumps(inside(options)))
        return 0
    os.environ |= {
        "KD_DECODERS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        job = LocalJob(
            {"dnn": 1, "data": 2}, ["-m", "remote", *sys.argv[1:], "--rows", str(file)]
        )
        try:
            code = job.wait()
        finally:
            job.close()
        if code:
            return code
        rows = [
            {name: rounded(row.get(name, "")) for name in NAMES}
            for row in json.loads(file.read_text())
        ]
    for section, name in (
        ("cost", "cpu_ms"),
        ("cost", "trainer_cpu_ms"),
        ("bound", "images_per_second"),
    ):
        chosen = [row for row in rows if row["part"] == section and row["round"]]
        median = {
            w: statistics.median(r[name] for r in chosen if r["loader"] == w)
            for w in ("local", "ray")
        }
        print(f"{section} {name}: local {median['local']:.2f}, ray {median['ray']:.2f}")
    print(
        [
            (row["part"], row["longest_wait_s"])
            for row in rows
            if row["longest_wait_s"] != ""
        ]
    )
    argv = ["FOLDER" if word == options.data else word for word in sys.argv[1:]]
    write("remote", " ".join(["python benchmarks/remote.py", *argv]), rows)
    return 0


def rounded(value: Any) -> Any:
    """Round a measurement."""
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
